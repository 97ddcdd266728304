#include "weights/names.h"

#include <headrace/receiver.h>
#include <string.h>

static bool has_control_character(const char *text, size_t len) {
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)text[i] < 0x20 || text[i] == 0x7f)
            return true;
    return false;
}

static hr_status check_text(const char *what, const char *text, size_t most, hr_error *err) {
    if (text == NULL || text[0] == '\0')
        return hr_fail(err, HR_ERR_INVALID, "%s is empty; give one", what);
    size_t len = strnlen(text, most + 1);
    if (len > most)
        return hr_fail(err, HR_ERR_INVALID, "%s is longer than %zu bytes: '%.64s...'", what, most,
                       text);
    if (has_control_character(text, len))
        return hr_fail(err, HR_ERR_INVALID, "%s has a control character", what);
    return HR_OK;
}

hr_status hr_adapter_name_check(const char *name, hr_error *err) {
    HR_TRY(check_text("lora_name", name, HR_LORA_NAME_SIZE - 1, err));
    if (strchr(name, ':') != NULL)
        return hr_fail(err, HR_ERR_INVALID, "lora_name '%s' must not contain ':'", name);
    return HR_OK;
}

hr_status hr_session_id_check(const char *session_id, hr_error *err) {
    HR_TRY(check_text("session_id", session_id, HR_SESSION_ID_SIZE - 1, err));
    for (const char *c = session_id; *c != '\0'; c++)
        if (*c == ' ' || (unsigned char)*c > 0x7e)
            return hr_fail(err, HR_ERR_INVALID, "session_id '%s' must be printable ASCII",
                           session_id);
    return HR_OK;
}

hr_status hr_weight_version_check(const char *weight_version, hr_error *err) {
    return check_text("weight_version", weight_version, HR_WEIGHT_VERSION_SIZE - 1, err);
}

/* Parts of names that only adapters have, as PEFT spells them. */
static bool is_of_an_adapter(const char *name) {
    static const char *const marks[] = {"lora_A.",          "lora_B.",         "lora_embedding_A",
                                        "lora_embedding_B", "lora_magnitude_", NULL};
    const char *first = strstr(name, "lora_");
    if (first == NULL)
        return false;
    for (size_t i = 0; marks[i] != NULL; i++)
        if (strstr(first, marks[i]) != NULL)
            return true;
    return false;
}

hr_status hr_wire_name_split(const char *name, const char *adapter, hr_wire_name *out,
                             hr_error *err) {
    HR_TRY(check_text("a tensor's name", name, HR_TENSOR_NAME_MAX, err));
    const char *colon = strchr(name, ':');
    hr_wire_name split = {.key = name};
    if (colon != NULL) {
        split.adapter = name;
        split.adapter_len = (size_t)(colon - name);
        split.key = colon + 1;
    } else if (adapter != NULL) {
        split.adapter = adapter;
        split.adapter_len = strlen(adapter);
    }
    split.key_len = strlen(split.key);
    if (split.key_len == 0 || (colon != NULL && split.adapter_len == 0))
        return hr_fail(err, HR_ERR_INVALID,
                       "tensor '%.200s': wanted 'adapter:name' around the first colon", name);
    if (split.adapter == NULL && is_of_an_adapter(name))
        return hr_fail(err, HR_ERR_INVALID,
                       "tensor '%.200s' is of an adapter but names none; send it as "
                       "'<lora_name>:%.200s'",
                       name, name);
    if (split.adapter == NULL && strstr(name, ".base_layer.") != NULL)
        return hr_fail(err, HR_ERR_INVALID,
                       "base tensor '%.200s' has the name that it has inside a PEFT model; send it "
                       "without '.base_layer' and without the adapter merged in",
                       name);
    *out = split;
    return HR_OK;
}
