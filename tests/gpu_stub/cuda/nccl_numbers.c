/* The types of numbers that NCCL reduces, by ncclDataType_t: 0 int8, 1 uint8, 2 int32, 3 uint32,
 * 4 int64, 5 uint64, 6 half, 7 float, 8 double, 9 bfloat16. Sums are taken in double. */
#include "nccl.h"
#include <string.h>

size_t nccl_size_of(int type) {
    return (const size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}[type];
}
int nccl_is_whole(int type) { return type <= 5; }

static double half_to_double(uint16_t h) {
    _Float16 f;
    memcpy(&f, &h, 2);
    return f;
}
static uint16_t double_to_half(double v) {
    _Float16 h = v;
    uint16_t u;
    memcpy(&u, &h, 2);
    return u;
}
static double bf16_to_double(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static uint16_t double_to_bf16(double v) { /* to the nearest, ties to even */
    float f = v;
    uint32_t u;
    memcpy(&u, &f, 4);
    if (f != f) return 0x7fc0;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

union number nccl_load(const void *p, size_t i, int type) {
    switch (type) {
    case 0: return (union number){.i = ((int8_t *)p)[i]};
    case 1: return (union number){.i = ((uint8_t *)p)[i]};
    case 2: return (union number){.i = ((int32_t *)p)[i]};
    case 3: return (union number){.i = ((uint32_t *)p)[i]};
    case 4: case 5: return (union number){.i = ((int64_t *)p)[i]};
    case 6: return (union number){.f = half_to_double(((uint16_t *)p)[i])};
    case 7: return (union number){.f = ((float *)p)[i]};
    case 8: return (union number){.f = ((double *)p)[i]};
    default: return (union number){.f = bf16_to_double(((uint16_t *)p)[i])};
    }
}
void nccl_store(void *p, size_t i, int type, union number v) {
    switch (type) {
    case 0: case 1: ((uint8_t *)p)[i] = v.i; break;
    case 2: case 3: ((uint32_t *)p)[i] = v.i; break;
    case 4: case 5: ((int64_t *)p)[i] = v.i; break;
    case 6: ((uint16_t *)p)[i] = double_to_half(v.f); break;
    case 7: ((float *)p)[i] = v.f; break;
    case 8: ((double *)p)[i] = v.f; break;
    default: ((uint16_t *)p)[i] = double_to_bf16(v.f);
    }
}

#define COMBINE(a, b)                                                                              \
    (op == 1 ? a * b : op == 2 ? (a > b ? a : b) : op == 3 ? (a < b ? a : b) : a + b)
union number nccl_combine(union number a, union number b, int op, int whole) {
    if (whole) return (union number){.i = COMBINE(a.i, b.i)};
    return (union number){.f = COMBINE(a.f, b.f)};
}
