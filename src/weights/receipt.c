#include "weights/receipt.h"

#include <string.h>

typedef struct block {
    hr_memory memory;
    size_t audit_size; /* of the audit's block */
    hr_receipt receipt;
    hr_receipt_adapter adapters[];
} block;

static block *block_of(const hr_receipt *receipt) {
    return (block *)((uintptr_t)receipt - offsetof(block, receipt));
}

hr_receipt *hr_receipt_create(const hr_memory *memory, size_t n_adapters) {
    block *made =
        hr_memory_zeroed(memory, sizeof *made + n_adapters * sizeof(hr_receipt_adapter), 1);
    if (made == NULL)
        return NULL;
    made->memory = *memory;
    made->receipt.adapters = made->adapters;
    made->receipt.n_adapters = n_adapters;
    return &made->receipt;
}

/* Names lie behind the array, in its order. */
static void point_at_names(hr_receipt *receipt) {
    char *text = (char *)(receipt->audit + receipt->n_audit);
    for (size_t i = 0; i < receipt->n_audit; i++) {
        receipt->audit[i].name = text;
        text += strlen(text) + 1;
    }
}

bool hr_receipt_put_audit(hr_receipt *receipt, hr_stash_entry *const *sorted, size_t n) {
    block *b = block_of(receipt);
    size_t size = n * sizeof(hr_receipt_tensor);
    for (size_t i = 0; i < n; i++)
        size += strlen(sorted[i]->name) + 1;
    receipt->audit = hr_memory_array(&b->memory, size, 1);
    if (receipt->audit == NULL)
        return false;
    b->audit_size = size;
    receipt->n_audit = n;
    char *text = (char *)(receipt->audit + n);
    for (size_t i = 0; i < n; i++) {
        hr_receipt_tensor *to = &receipt->audit[i];
        *to = (hr_receipt_tensor){.bytes = sorted[i]->tensor.bytes};
        memcpy(to->xxh3, sorted[i]->xxh3, sizeof to->xxh3);
        memcpy(to->sha256, sorted[i]->sha256, sizeof to->sha256);
        size_t name_size = strlen(sorted[i]->name) + 1;
        memcpy(text, sorted[i]->name, name_size);
        text += name_size;
    }
    point_at_names(receipt);
    return true;
}

hr_receipt *hr_receipt_copy(const hr_receipt *receipt) {
    const block *from = block_of(receipt);
    hr_receipt *copy = hr_receipt_create(&from->memory, receipt->n_adapters);
    if (copy == NULL)
        return NULL;
    hr_receipt_adapter *adapters = copy->adapters;
    *copy = *receipt;
    copy->adapters = adapters;
    copy->audit = NULL;
    copy->n_audit = 0;
    memcpy(adapters, receipt->adapters, receipt->n_adapters * sizeof *adapters);
    if (receipt->audit == NULL)
        return copy;
    copy->audit = hr_memory_array(&from->memory, from->audit_size, 1);
    if (copy->audit == NULL) {
        hr_receipt_free(copy);
        return NULL;
    }
    memcpy(copy->audit, receipt->audit, from->audit_size);
    copy->n_audit = receipt->n_audit;
    block_of(copy)->audit_size = from->audit_size;
    point_at_names(copy);
    return copy;
}

void hr_receipt_drop_audit(hr_receipt *receipt) {
    hr_memory_free(&block_of(receipt)->memory, receipt->audit);
    receipt->audit = NULL;
    receipt->n_audit = 0;
}

void hr_receipt_free(hr_receipt *receipt) {
    if (receipt == NULL)
        return;
    hr_receipt_drop_audit(receipt);
    hr_memory memory = block_of(receipt)->memory;
    hr_memory_free(&memory, block_of(receipt));
}
