/* Routes of SGLang that this engine does not serve: each says at once why and what to send instead,
 * because a trainer that waits for a peer who never comes hangs. */
#include "server/reply.h"
#include "server/update_call.h"

#include <string.h>

#define NO_GROUP                                                                                   \
    "this engine joins no torch.distributed group; send the tensors by "                           \
    "/update_weights_from_tensor or /update_weights_from_safetensors"

static const struct {
    const char *path, *why;
    bool adapters; /* the reply has error_message and not message */
} refused[] = {
    {"/init_weights_update_group", NO_GROUP, false},
    {"/destroy_weights_update_group", "The group to be destroyed does not exist. (" NO_GROUP ")",
     false},
    {"/update_weights_from_distributed", NO_GROUP, false},
    {"/load_lora_adapter_from_distributed",
     "this engine joins no torch.distributed group; send the adapter by "
     "/load_lora_adapter_from_tensors or /update_weights_from_safetensors",
     true},
    {"/update_weights_from_ipc",
     "handles of GPU memory name nothing on this engine, which has no GPU; send the tensors by "
     "/update_weights_from_tensor or /update_weights_from_safetensors",
     false},
    {"/pull_weights",
     "this engine keeps no local checkpoint to bring up to date; put the checkpoint where the "
     "engine can read it and call /update_weights_from_disk",
     false},
};

void hr_route_refused(hr_exchange *exchange, void *app) {
    hr_server *server = app;
    hr_error err;
    hr_buf body = {0};
    hr_json_writer w;
    size_t i = 0;
    while (strcmp(refused[i].path, hr_exchange_path(exchange)) != 0) {
        i++;
        HR_ASSERT(i < sizeof refused / sizeof refused[0]); /* the table of routes has others */
    }
    hr_fail(&err, HR_ERR_UNSUPPORTED, "%s", refused[i].why);
    hr_log_refusal(exchange, &err);
    hr_json_writer_init(&w, &body);
    hr_json_object_begin(&w);
    hr_json_put_bool(&w, "success", false);
    hr_json_put_string(&w, refused[i].adapters ? "error_message" : "message", err.message);
    if (refused[i].adapters) {
        hr_json_key(&w, "loaded_adapters");
        hr_write_loaded_adapters(server->options.engine, &w);
    }
    hr_json_put_string(&w, "status", hr_status_name(err.status));
    hr_json_object_end(&w);
    hr_exchange_reply(exchange, 400, &body);
}
