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

#define EACH(field, value)                                                                          \
    for (size_t i = 0; i < n; i++) to[i].field = value
void nccl_load(const void *p, size_t n, int type, union number *to) {
    switch (type) {
    case 0: EACH(i, ((int8_t *)p)[i]); break;
    case 1: EACH(i, ((uint8_t *)p)[i]); break;
    case 2: EACH(i, ((int32_t *)p)[i]); break;
    case 3: EACH(i, ((uint32_t *)p)[i]); break;
    case 4: case 5: EACH(i, ((int64_t *)p)[i]); break;
    case 6: EACH(f, half_to_double(((uint16_t *)p)[i])); break;
    case 7: EACH(f, ((float *)p)[i]); break;
    case 8: EACH(f, ((double *)p)[i]); break;
    default: EACH(f, bf16_to_double(((uint16_t *)p)[i]));
    }
}
#define ALL(kind, value)                                                                           \
    for (size_t i = 0; i < n; i++) ((kind *)p)[i] = value
void nccl_store(const union number *from, size_t n, int type, void *p) {
    switch (type) {
    case 0: case 1: ALL(uint8_t, from[i].i); break;
    case 2: case 3: ALL(uint32_t, from[i].i); break;
    case 4: case 5: ALL(uint64_t, from[i].i); break;
    case 6: ALL(uint16_t, double_to_half(from[i].f)); break;
    case 7: ALL(float, from[i].f); break;
    case 8: ALL(double, from[i].f); break;
    default: ALL(uint16_t, double_to_bf16(from[i].f));
    }
}

#define COMBINE(field)                                                                             \
    for (size_t i = 0; i < n; i++) {                                                               \
        __typeof__(sum->field) a = sum[i].field, b = with[i].field;                                \
        sum[i].field = op == 1 ? a * b : op == 2 ? (a > b ? a : b) : (a < b ? a : b);              \
    }
void nccl_combine(union number *sum, const union number *with, size_t n, int type, int op) {
    if (op == 0 || op == 4) {
        if (nccl_is_whole(type)) for (size_t i = 0; i < n; i++) sum[i].i += with[i].i;
        else for (size_t i = 0; i < n; i++) sum[i].f += with[i].f;
    } else if (nccl_is_whole(type)) COMBINE(i)
    else COMBINE(f)
}
