/* What the model room promises beyond numbers: options refused with a reason, panels shared without
 * gap or overlap, one page cleared and no other. */
#include "model/step.h"
#include "tiny_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// cmocka.h needs the headers above it
#include <cmocka.h>

static char dir[] = "/tmp/headrace-model-XXXXXX";
static char model_dir[64], adapter_dir[64];
static hr_pool *pool;
static hr_model *model;

static hr_model_options options_of(const char *dtype, const char *isa, uint32_t context_length) {
    return (hr_model_options){.dir = model_dir,
                              .dtype = dtype,
                              .isa = isa,
                              .context_length = context_length,
                              .pool = pool};
}

static void expect_refused(hr_model_options options, hr_status status, const char *named) {
    hr_error err = {0};
    hr_model *none = NULL;
    assert_int_equal(hr_model_load(&options, &none, &err), status);
    assert_null(none);
    assert_non_null(strstr(err.message, named));
    assert_null(strchr(err.message, '\n'));
}

static void options_that_cannot_be_met_are_refused(void **state) {
    (void)state;
    expect_refused(options_of("float16", NULL, 0), HR_ERR_INVALID, "float16");
    expect_refused(options_of(NULL, "sse", 0), HR_ERR_INVALID, "sse");
    expect_refused(options_of(NULL, NULL, 1025), HR_ERR_INVALID, "1024");
    hr_model_options elsewhere = options_of(NULL, NULL, 0);
    elsewhere.dir = "/nonexistent";
    expect_refused(elsewhere, HR_ERR_NOT_FOUND, "/nonexistent");
}

static void info_describes_the_model(void **state) {
    (void)state;
    const hr_model_info *info = hr_model_info_of(model);
    assert_int_equal(info->compute, HR_COMPUTE_BF16);
    assert_int_equal(info->context_length, 1024);
    assert_int_equal(info->config->vocab_size, TINY_VOCAB);
    assert_int_equal(info->kv_page_bytes, 2 * 2 * hr_kv_slot_bytes(HR_COMPUTE_BF16, 16));
}

static void workers_share_panels_without_gap_or_overlap(void **state) {
    (void)state;
    for (uint32_t n = 1; n < 40; n++)
        for (unsigned workers = 1; workers < 24; workers++) {
            uint32_t next = 0;
            for (unsigned w = 0; w < workers; w++) {
                hr_panels panels = hr_worker_panels(n, w, workers);
                assert_int_equal(panels.begin, next);
                assert_true(panels.end >= panels.begin);
                assert_true(panels.begin % 2 == 0 || panels.begin == n);
                next = panels.end;
            }
            assert_int_equal(next, n);
        }
}

static void a_cleared_page_is_zero_and_others_are_untouched(void **state) {
    (void)state;
    size_t page_bytes = hr_model_info_of(model)->kv_page_bytes, in_layer = page_bytes / 2;
    hr_kv kv = {malloc(3 * page_bytes), 3};
    memset(kv.base, 0x5a, 3 * page_bytes);
    hr_model_kv_clear_page(model, &kv, 1);
    for (size_t i = 0; i < 3 * page_bytes; i++)
        assert_int_equal(kv.base[i], i / in_layer % 3 == 1 ? 0 : 0x5a);
    free(kv.base);
}

static void an_adapter_knows_its_rank_and_size(void **state) {
    (void)state;
    hr_error err = {0};
    hr_lora *lora = NULL;
    assert_int_equal(hr_lora_load(model, adapter_dir, &lora, &err), HR_OK);
    assert_int_equal(hr_lora_max_rank(lora), 5);
    assert_true(hr_lora_bytes(lora) > 0);
    hr_lora_destroy(lora);
    assert_int_not_equal(hr_lora_load(model, model_dir, &lora, &err), HR_OK);
}

static void buffers_for_impossible_steps_are_refused(void **state) {
    (void)state;
    hr_model_workspace *ws = NULL;
    hr_error err = {0};
    assert_int_equal(hr_model_workspace_create(model, 0, 8, 8, &ws, &err), HR_ERR_INVALID);
    assert_int_equal(hr_model_workspace_create(model, 1, 0, 1, &ws, &err), HR_ERR_INVALID);
    assert_int_equal(hr_model_workspace_create(model, 1, 8, 9, &ws, &err), HR_ERR_INVALID);
    assert_null(ws);
}

static int set_up(void **state) {
    (void)state;
    hr_model_options options = options_of(NULL, NULL, 0);
    if (hr_pool_create(2, &pool, NULL) != HR_OK)
        return 1;
    options.pool = pool;
    return hr_model_load(&options, &model, NULL) == HR_OK ? 0 : 1;
}

static int tear_down(void **state) {
    (void)state;
    hr_model_destroy(model);
    hr_pool_destroy(pool);
    return 0;
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_that_cannot_be_met_are_refused),
        cmocka_unit_test(info_describes_the_model),
        cmocka_unit_test(workers_share_panels_without_gap_or_overlap),
        cmocka_unit_test(a_cleared_page_is_zero_and_others_are_untouched),
        cmocka_unit_test(an_adapter_knows_its_rank_and_size),
        cmocka_unit_test(buffers_for_impossible_steps_are_refused),
    };
    if (mkdtemp(dir) == NULL)
        return 2;
    snprintf(model_dir, sizeof model_dir, "%s/model", dir);
    snprintf(adapter_dir, sizeof adapter_dir, "%s/adapter", dir);
    tiny_model_write(dir);
    int rc = cmocka_run_group_tests(tests, set_up, tear_down);
    tiny_model_remove(dir);
    return rc;
}
