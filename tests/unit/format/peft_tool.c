/* Prints how an adapter directory resolves, for tests that hold it against PEFT itself.
 *
 *   peft_tool --fields                    the table of LoraConfig fields, as JSON
 *   peft_tool DIR MODULES.json [BASE_DIR] the modules, ranks and scales as JSON; on a refusal the
 * message on stderr and exit status 1
 *
 * MODULES.json is a list of {"path", "in", "out", "kind"}, kind one of linear, embedding, head,
 * other. BASE_DIR is the model's directory, for whole weights beside the pairs. */
#include "format/checkpoint.h"
#include "format/json.h"
#include "format/json_writer.h"
#include "format/peft.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct tool {
    cJSON *list;
    hr_module_name *modules;
    size_t n;
    hr_checkpoint *base;
} tool;

static bool base_equals(void *ctx, size_t module, const hr_tensor *weight) {
    const tool *t = ctx;
    char name[256];
    snprintf(name, sizeof name, "%s.weight", t->modules[module].path);
    const hr_tensor *base = hr_checkpoint_find(t->base, name);
    if (base == NULL) /* a tied head */
        base = hr_checkpoint_find(t->base, "model.embed_tokens.weight");
    return base != NULL && base->dtype == weight->dtype && base->bytes == weight->bytes &&
           memcmp(base->data, weight->data, base->bytes) == 0;
}

static hr_status read_modules(const char *path, tool *t, hr_error *err) {
    cJSON *tree = NULL;
    HR_TRY(hr_json_parse_file(path, 0, &tree, err));
    t->list = tree;
    const cJSON *list = hr_json_get(tree, "modules");
    t->modules = calloc((size_t)cJSON_GetArraySize(list) + 1, sizeof *t->modules);
    for (const cJSON *item = list ? list->child : NULL; item != NULL; item = item->next) {
        hr_module_name *module = &t->modules[t->n++];
        const char *kind = "";
        HR_TRY(hr_json_get_string(item, "path", &module->path, err));
        HR_TRY(hr_json_get_string(item, "kind", &kind, err));
        HR_TRY(hr_json_get_u64(item, "in", 0, UINT32_MAX, &module->in, err));
        HR_TRY(hr_json_get_u64(item, "out", 0, UINT32_MAX, &module->out, err));
        module->is_output_head = strcmp(kind, "head") == 0;
        module->is_linear = module->is_output_head || strcmp(kind, "linear") == 0;
        module->is_embedding = strcmp(kind, "embedding") == 0;
    }
    return HR_OK;
}

static void print_peft(const hr_peft *peft, const tool *t, hr_json_writer *w) {
    hr_json_object_begin(w);
    hr_json_key(w, "modules");
    hr_json_object_begin(w);
    for (size_t i = 0; i < peft->n_modules; i++) {
        const hr_peft_module *m = &peft->modules[i];
        hr_json_key(w, t->modules[m->module].path);
        hr_json_object_begin(w);
        hr_json_put_u64(w, "rank", m->rank);
        hr_json_key(w, "scale");
        hr_json_write_f32(w, m->scale);
        hr_json_put_u64(w, "a_rows", m->a.shape[0]);
        hr_json_put_u64(w, "b_rows", m->b.shape[0]);
        hr_json_object_end(w);
    }
    hr_json_object_end(w);
    hr_json_key(w, "warnings");
    hr_json_array_begin(w);
    for (size_t i = 0; i < peft->n_warnings; i++)
        hr_json_write_string(w, peft->warnings[i]);
    hr_json_array_end(w);
    hr_json_object_end(w);
}

static hr_status print_adapter(int argc, char **argv, tool *t, hr_json_writer *w, hr_error *err) {
    hr_peft peft = {0};
    hr_peft_base base = {base_equals, t};
    HR_TRY(read_modules(argv[2], t, err));
    if (argc > 3)
        HR_TRY(hr_checkpoint_open(argv[3], &t->base, err));
    HR_TRY(hr_peft_open(argv[1], t->modules, t->n, t->base ? &base : NULL, &peft, err));
    hr_status status = HR_OK;
    for (size_t i = 0; i < peft.n_modules && status == HR_OK; i++)
        status = hr_peft_check_values(&peft.modules[i], HR_DTYPE_F32, err);
    if (status == HR_OK)
        print_peft(&peft, t, w);
    hr_peft_close(&peft);
    return status;
}

static void print_fields(hr_json_writer *w) {
    static const char *const classes[] = {"handled", "irrelevant", "refused"};
    hr_json_object_begin(w);
    for (size_t i = 0; i < hr_n_peft_fields; i++)
        hr_json_put_string(w, hr_peft_fields[i].name, classes[hr_peft_fields[i].field_class]);
    hr_json_object_end(w);
}

int main(int argc, char **argv) {
    hr_buf text = {0};
    hr_json_writer w;
    hr_error err = {0};
    tool t = {0};
    hr_status status = HR_OK;
    hr_json_writer_init(&w, &text);
    if (argc == 2 && strcmp(argv[1], "--fields") == 0)
        print_fields(&w);
    else if (argc == 3 || argc == 4)
        status = print_adapter(argc, argv, &t, &w, &err);
    else
        status = hr_fail(&err, HR_ERR_INVALID,
                         "usage: peft_tool --fields | DIR MODULES.json [BASE_DIR]");
    if (status == HR_OK)
        printf("%s\n", text.data);
    else
        fprintf(stderr, "%s\n", err.message);
    hr_checkpoint_close(t.base);
    cJSON_Delete(t.list);
    free(t.modules);
    hr_buf_free(&text);
    return status == HR_OK ? 0 : 1;
}
