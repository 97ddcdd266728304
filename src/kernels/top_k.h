/* The heap of top_k: the k best ids so far, the worst of them at its root, so that most candidates
 * are turned away by one comparison. Order is exact on integers (rank below), so tiers share it. */
#ifndef HR_KERNELS_TOP_K_H
#define HR_KERNELS_TOP_K_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* An integer that orders as the value does: NaN counts as -inf, denormals and -0 as 0. */
static inline int32_t hr_top_k_rank(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000)
        return -0x7f800000;
    if (magnitude < 0x00800000)
        return 0;
    return bits < 0 ? -magnitude : magnitude;
}

/* Whether id a stands behind id b. */
static inline bool hr_top_k_behind(const float *x, uint32_t a, uint32_t b) {
    int32_t rank_a = hr_top_k_rank(x[a]), rank_b = hr_top_k_rank(x[b]);
    return rank_a != rank_b ? rank_a < rank_b : a > b;
}

static inline void hr_top_k_sink(const float *x, uint32_t *heap, uint32_t size, uint32_t at) {
    uint32_t id = heap[at];
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= size)
            break;
        if (child + 1 < size && hr_top_k_behind(x, heap[child + 1], heap[child]))
            child++;
        if (!hr_top_k_behind(x, heap[child], id))
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = id;
}

static inline void hr_top_k_heapify(const float *x, uint32_t *heap, uint32_t size) {
    for (uint32_t at = size / 2; at-- > 0;)
        hr_top_k_sink(x, heap, size, at);
}

static inline void hr_top_k_offer(const float *x, uint32_t *heap, uint32_t size, uint32_t id) {
    if (!hr_top_k_behind(x, heap[0], id))
        return;
    heap[0] = id;
    hr_top_k_sink(x, heap, size, 0);
}

/* Sorts the heap, best first, and reads the values. */
static inline void hr_top_k_finish(const float *x, uint32_t *heap, float *values, uint32_t size) {
    for (uint32_t left = size; left > 1; left--) {
        uint32_t worst = heap[0];
        heap[0] = heap[left - 1];
        hr_top_k_sink(x, heap, left - 1, 0);
        heap[left - 1] = worst;
    }
    for (uint32_t i = 0; i < size; i++)
        values[i] = x[heap[i]];
}

#endif
