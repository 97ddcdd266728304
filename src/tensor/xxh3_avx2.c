/* XXH3-128 for machines with AVX2. */
#include "tensor/xxh3.inc.h"

const hr_xxh3_ops hr_xxh3_avx2 = {one, update};
