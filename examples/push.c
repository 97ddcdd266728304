/* Publishes a LoRA adapter that lies in memory to a running engine; the next request may name it.
 *
 *     cc -std=c99 push.c $(pkg-config --cflags --libs headrace) -o push
 *     ./push http://127.0.0.1:30000 576 576
 *
 * The numbers are the inputs and outputs of the model's q_proj (here SmolLM2-135M's). */
#include <headrace/publisher.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LAYER "base_model.model.model.layers.0.self_attn.q_proj." /* as PEFT calls it */
enum { RANK = 4, WIDEST = 16384 };

static float values[RANK * WIDEST]; /* a trainer has its own, and others for each tensor */
static hr_tensor tensors[2];

/* Where the publisher pulls from: one unit, whose tensors travel together, then the end. */
static hr_status next(void *given, hr_unit *unit, hr_error *err) {
    (void)err;
    memset(unit, 0, sizeof *unit); /* n = 0: the end */
    if (*(int *)given == 0) {
        unit->tensors = tensors;
        unit->n = 2;
        unit->adapter = "mine";
    }
    *(int *)given = 1;
    return HR_OK;
}

int main(int argc, char **argv) {
    unsigned long in = argc == 4 ? strtoul(argv[2], NULL, 10) : 0;
    unsigned long out = argc == 4 ? strtoul(argv[3], NULL, 10) : 0;
    if (in == 0 || out == 0 || in > WIDEST || out > WIDEST) {
        fprintf(stderr, "usage: push URL IN OUT\n");
        return 2;
    }
    for (size_t i = 0; i < RANK * WIDEST; i++)
        values[i] = (float)(i % 7) * 0.01f;
    tensors[0] = (hr_tensor){.name = LAYER "lora_A.weight", .shape = {RANK, in}};
    tensors[1] = (hr_tensor){.name = LAYER "lora_B.weight", .shape = {out, RANK}};
    for (size_t i = 0; i < 2; i++) {
        tensors[i].ndim = 2;
        tensors[i].dtype = HR_DTYPE_F32;
        tensors[i].data = values; /* bytes are sent from where they lie */
        tensors[i].bytes = tensors[i].shape[0] * tensors[i].shape[1] * sizeof values[0];
    }

    static const char config[] = "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, "
                                 "\"target_modules\": [\"layers.0.self_attn.q_proj\"]}";
    const char *engines[] = {argv[1]}; /* any number: all of them publish it, or none */
    int given = 0;
    hr_publisher_options options = {.engines = engines, .n_engines = 1};
    hr_push_adapter adapter = {.name = "mine", .config = config, .config_len = sizeof config - 1};
    hr_push push = {.adapters = &adapter,
                    .n_adapters = 1,
                    .weight_version = "step-1",
                    .source = {.self = &given, .next = next}};
    hr_publisher *publisher = NULL; /* a trainer keeps it for all its pushes */
    hr_push_receipt *receipt = NULL;
    hr_error err;
    hr_status status = hr_publisher_create(&options, &publisher, &err);
    if (status == HR_OK)
        status = hr_publisher_push(publisher, &push, &receipt, &err);
    if (status == HR_OK)
        printf("%s\n", hr_push_receipt_json(receipt));
    else /* the message names the engine; hr_publisher_report says what each of them serves */
        fprintf(stderr, "%s: %s\n", hr_status_name(status), err.message);
    hr_push_receipt_free(receipt);
    hr_publisher_destroy(publisher);
    return status == HR_OK ? 0 : 1;
}
