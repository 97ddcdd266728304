/* A model named by its hub id is looked up in the local Hugging Face cache; nothing is ever
 * downloaded. */
#ifndef HR_CLI_HUB_H
#define HR_CLI_HUB_H

#include "base/error.h"

/* Directory of a model: name itself when it is a directory; else, when it looks like "org/name" (or
 * "name"), the snapshot that refs/main of the local cache points at (HF_HUB_CACHE, HF_HOME/hub,
 * XDG_CACHE_HOME/huggingface/hub,
 * ~/.cache/huggingface/hub). *out is the caller's to free. ERR_NOT_FOUND says where was looked and
 * how to download. */
hr_status hr_hub_resolve(const char *name, char **out, hr_error *err);

#endif
