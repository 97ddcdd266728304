/* From a tokenizer.json to a tokenizer. */
#include "text/post_processor.h"
#include "text/tokenizer_parts.h"

#include <malloc.h>
#include <stdlib.h>

static hr_status read_parts(hr_tokenizer *t, const cJSON *root, hr_error *err) {
    const cJSON *model = hr_json_get(root, "model");
    if (!cJSON_IsObject(model))
        return hr_fail(err, HR_ERR_CORRUPT, "wanted an object \"model\", got %s",
                       model == NULL ? "nothing" : hr_json_kind(model));
    HR_TRY(hr_bpe_read(&t->bpe, model, err));
    HR_TRY(hr_normalizer_read(&t->normalizer, hr_json_get(root, "normalizer"), err));
    HR_TRY(hr_added_tokens_read(&t->added, hr_json_get(root, "added_tokens"), &t->bpe,
                                &t->normalizer, err));
    HR_TRY(hr_pretokenizer_read(&t->pre, hr_json_get(root, "pre_tokenizer"), err));
    HR_TRY(
        hr_post_processor_read(hr_json_get(root, "post_processor"), &t->prefix, &t->suffix, err));
    return hr_decoder_read(&t->decoder, hr_json_get(root, "decoder"), err);
}

static hr_status from_tree(const cJSON *root, hr_tokenizer **out, hr_error *err) {
    hr_tokenizer *t = calloc(1, sizeof *t);
    if (t == NULL)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a tokenizer");
    hr_status status = read_parts(t, root, err);
    if (status != HR_OK) {
        hr_tokenizer_free(t);
        return status;
    }
    *out = t;
    return HR_OK;
}

hr_status hr_tokenizer_parse(const char *json, size_t len, hr_tokenizer **out, hr_error *err) {
    cJSON *root;
    HR_TRY(hr_json_parse(json, len, HR_TOKENIZER_MAX_FILE, &root, err));
    hr_status status = from_tree(root, out, err);
    cJSON_Delete(root);
    return status;
}

hr_status hr_tokenizer_load(const char *model_dir, hr_tokenizer **out, hr_error *err) {
    hr_buf path = {0};
    hr_buf_printf(&path, "%s/tokenizer.json", model_dir);
    if (path.failed)
        return hr_fail(err, HR_ERR_NO_MEMORY, "no memory for a path");
    cJSON *root = NULL;
    hr_status status = hr_json_parse_file(path.data, HR_TOKENIZER_MAX_FILE, &root, err);
    if (status == HR_ERR_NOT_FOUND)
        hr_fail(err, status,
                "%s does not exist; save the model's fast tokenizer there "
                "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))",
                path.data);
    if (status == HR_OK) {
        status = from_tree(root, out, err);
        if (status != HR_OK)
            hr_fail_context(err, status, "%s", path.data);
    }
    cJSON_Delete(root);
    hr_buf_free(&path);
    malloc_trim(0); /* the tree is many times what is kept; its pages would stay with the process */
    return status;
}

void hr_tokenizer_free(hr_tokenizer *t) {
    if (t == NULL)
        return;
    hr_bpe_free(&t->bpe);
    hr_added_tokens_free(&t->added);
    hr_normalizer_free(&t->normalizer);
    hr_pretokenizer_free(&t->pre);
    hr_decoder_free(&t->decoder);
    free(t->prefix.data);
    free(t->suffix.data);
    free(t);
}
