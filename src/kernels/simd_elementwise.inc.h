/* Norms, rotary embedding, SiLU, rounding into compute elements, cache writes. */

/* Zeros in compute elements [n, n_padded). */
HR_INLINE void zero_tail(hr_compute c, uint32_t n, uint32_t n_padded, void *out) {
    size_t element = hr_compute_bytes(c);
    if (n < n_padded)
        memset((char *)out + n * element, 0, (n_padded - n) * element);
}

HR_INLINE void rmsnorm(hr_compute c, const float *x, const float *w, uint32_t n, uint32_t n_padded,
                       float eps, void *out) {
    v16 sum = v_zero();
    for (uint32_t i = 0; i < n; i += 16) { /* lanes past n add +0 to a sum of squares */
        v16 v = v_load_n(x + i, n - i, 0.0f);
        sum = v_fma(v, v, sum);
    }
    float mean = lane_tree(sum) / (float)n;
    v16 r = v_set(1.0f / v_lane0(v_sqrt(v_set(mean + eps))));
    for (uint32_t i = 0; i < n; i += 16)
        store_n(c, out, i,
                v_mul(v_mul(v_load_n(x + i, n - i, 0.0f), r), v_load_n(w + i, n - i, 0.0f)), n - i);
    zero_tail(c, n, n_padded, out);
}

void HR_TIER(rmsnorm_bf16)(const float *x, const float *w, uint32_t n, uint32_t n_padded, float eps,
                           void *out) {
    rmsnorm(HR_COMPUTE_BF16, x, w, n, n_padded, eps, out);
}

void HR_TIER(rmsnorm_f32)(const float *x, const float *w, uint32_t n, uint32_t n_padded, float eps,
                          void *out) {
    rmsnorm(HR_COMPUTE_F32, x, w, n, n_padded, eps, out);
}

void HR_TIER(rope)(float *x, const float *cos, const float *sin, uint32_t n) {
    uint32_t half = n / 2;
    for (uint32_t i = 0; i < half; i += 16) {
        uint32_t left = half - i;
        v16 lo = v_load_n(x + i, left, 0.0f), hi = v_load_n(x + half + i, left, 0.0f);
        v16 co = v_load_n(cos + i, left, 0.0f), si = v_load_n(sin + i, left, 0.0f);
        v_store_n(x + i, v_fnma(hi, si, v_mul(lo, co)), left);
        v_store_n(x + half + i, v_fma(lo, si, v_mul(hi, co)), left);
    }
}

void HR_TIER(store_bf16)(const float *x, uint32_t n, uint32_t n_padded, void *out) {
    for (uint32_t i = 0; i < n; i += 16)
        v_store_bf16_n((uint16_t *)out + i, v_load_n(x + i, n - i, 0.0f), n - i);
    zero_tail(HR_COMPUTE_BF16, n, n_padded, out);
}

void HR_TIER(store_f32)(const float *x, uint32_t n, uint32_t n_padded, void *out) {
    memmove(out, x, n * sizeof *x);
    zero_tail(HR_COMPUTE_F32, n, n_padded, out);
}

/* One position: a lane of the keys' panels, a column of the values' panels. */
void HR_TIER(kv_store_bf16)(const float *k, const float *v, uint32_t head_dim, uint32_t slot,
                            char *kv) {
    const uint32_t padded = (uint32_t)hr_round_up(head_dim, HR_LEAF);
    uint16_t *key = (uint16_t *)(void *)kv + (size_t)(slot / HR_PANEL) * padded * HR_PANEL +
                    slot % HR_PANEL * 2;
    uint16_t *value = (uint16_t *)(void *)(kv + hr_kv_slot_bytes(HR_COMPUTE_BF16, head_dim) / 2) +
                      (size_t)(slot / 2) * 2 * HR_PANEL + slot % 2;
    for (uint32_t d = 0; d < padded; d += HR_PANEL) {
        uint32_t left = d < head_dim ? head_dim - d : 0;
        uint16_t k_part[HR_PANEL], v_part[HR_PANEL];
        v_store_bf16_n(k_part, v_load_n(k + d, left, 0.0f), 16);
        v_store_bf16_n(v_part, v_load_n(v + d, left, 0.0f), 16);
        for (uint32_t i = 0; i < HR_PANEL; i++) {
            key[(size_t)(d + i) / 2 * 2 * HR_PANEL + i % 2] = k_part[i];
            value[(size_t)d * HR_KV_PAGE_TOKENS + 2 * i] = v_part[i];
        }
    }
}

void HR_TIER(kv_store_f32)(const float *k, const float *v, uint32_t head_dim, uint32_t slot,
                           char *kv) {
    const uint32_t padded = (uint32_t)hr_round_up(head_dim, HR_LEAF);
    float *key =
        (float *)(void *)kv + (size_t)(slot / HR_PANEL) * padded * HR_PANEL + slot % HR_PANEL;
    float *value =
        (float *)(void *)(kv + hr_kv_slot_bytes(HR_COMPUTE_F32, head_dim) / 2) + slot * HR_PANEL;
    for (uint32_t d = 0; d < padded; d++) {
        key[(size_t)d * HR_PANEL] = d < head_dim ? k[d] : 0.0f;
        value[(size_t)(d / HR_PANEL) * HR_KV_PAGE_TOKENS * HR_PANEL + d % HR_PANEL] =
            d < head_dim ? v[d] : 0.0f;
    }
}

HR_INLINE void silu_mul(hr_compute c, const float *gate, const float *up, uint32_t n,
                        uint32_t n_padded, void *out) {
    for (uint32_t i = 0; i < n; i += 16) {
        v16 g = v_load_n(gate + i, n - i, 0.0f), u = v_load_n(up + i, n - i, 0.0f);
        v16 silu = v_div(g, v_add(v_set(1.0f), v_exp(v_neg(g))));
        store_n(c, out, i, v_mul(silu, u), n - i);
    }
    zero_tail(c, n, n_padded, out);
}

void HR_TIER(silu_mul_bf16)(const float *gate, const float *up, uint32_t n, uint32_t n_padded,
                            void *out) {
    silu_mul(HR_COMPUTE_BF16, gate, up, n, n_padded, out);
}

void HR_TIER(silu_mul_f32)(const float *gate, const float *up, uint32_t n, uint32_t n_padded,
                           void *out) {
    silu_mul(HR_COMPUTE_F32, gate, up, n, n_padded, out);
}

void HR_TIER(unpack_row_bf16)(const void *w, uint32_t row, uint32_t k, float *out) {
    const uint16_t *lane = (const uint16_t *)w +
                           row / HR_PANEL * hr_round_up(k, HR_LEAF) * HR_PANEL + row % HR_PANEL * 2;
    for (uint32_t i = 0; i < k; i++) {
        uint32_t bits = (uint32_t)lane[(size_t)(i / 2) * 2 * HR_PANEL + i % 2] << 16;
        memcpy(out + i, &bits, sizeof bits);
    }
}

void HR_TIER(unpack_row_f32)(const void *w, uint32_t row, uint32_t k, float *out) {
    const float *lane =
        (const float *)w + row / HR_PANEL * hr_round_up(k, HR_LEAF) * HR_PANEL + row % HR_PANEL;
    for (uint32_t i = 0; i < k; i++)
        out[i] = lane[(size_t)i * HR_PANEL];
}

void HR_TIER(add)(float *y, const float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i += 16)
        v_store_n(y + i, v_add(v_load_n(y + i, n - i, 0.0f), v_load_n(x + i, n - i, 0.0f)), n - i);
}
