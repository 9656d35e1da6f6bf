#define _GNU_SOURCE
#include "decode.h"

#include <string.h>

// All of AMX so far has a three-byte VEX prefix, map 0F38:
//   C4 | ~R ~X ~B 00010 | W ~vvvv L pp | opcode | ModRM [SIB] [displacement]
struct vex {
    int r, x, b;  // high bits of the register numbers in ModRM and SIB
    int vvvv, w, l;
    int pp;  // prefix: none, 66, F3, F2
    int opcode;
    int mod, reg, rm;
};
enum { kNone, k66, kF3, kF2 };
enum { kConfig = 0x49, kMemory = 0x4b, kBf16 = 0x5c, kInt8 = 0x5e };

static struct vex parse(const uint8_t* ip) {
    return (struct vex){
        .r = !(ip[1] & 0x80),
        .x = !(ip[1] & 0x40),
        .b = !(ip[1] & 0x20),
        .vvvv = (~ip[2] >> 3) & 15,
        .w = ip[2] >> 7,
        .l = (ip[2] >> 2) & 1,
        .pp = ip[2] & 3,
        .opcode = ip[3],
        .mod = ip[4] >> 6,
        .reg = (ip[4] >> 3) & 7,
        .rm = ip[4] & 7,
    };
}

int decode_is_amx(const uint8_t* ip) {
    if (ip[0] != 0xc4 || (ip[1] & 0x1f) != 2) return 0;
    const struct vex v = parse(ip);
    if (v.w || v.l) return 0;
    switch (v.opcode) {
        case kBf16:
            return v.mod == 3 && v.pp == kF3;  // F2 is TDPFP16PS, none and 66 are AMX-COMPLEX
        case kInt8:
            return v.mod == 3;
        case kMemory:
            return v.mod != 3 && v.pp != kNone;
        case kConfig:
            if (v.mod != 3) return v.reg == 0 && !v.r && (v.pp == kNone || v.pp == k66);
            return (v.pp == kNone && ip[4] == 0xc0) || (v.pp == kF2 && v.rm == 0);
        default:
            return 0;
    }
}

static uint64_t general_register(const greg_t* r, int number) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)r[order[number]];
}

struct operand {
    uint64_t base, index;  // base holds the displacement, index is scaled: a tile's row stride
    int has_sib, length;   // of the whole instruction
};

static int32_t displacement32(const uint8_t** p) {
    int32_t value;
    memcpy(&value, *p, 4);
    *p += 4;
    return value;
}

static struct operand address(const struct vex* v, const uint8_t* ip, const greg_t* r) {
    const uint8_t* p = ip + 5;
    struct operand o = {.has_sib = v->rm == 4};
    int64_t displacement = 0;
    int no_base = 0;
    if (o.has_sib) {
        const int sib = *p++, index = ((sib >> 3) & 7) | v->x << 3;
        if (index != 4) o.index = general_register(r, index) << (sib >> 6);
        no_base = (sib & 7) == 5 && v->mod == 0;
        if (!no_base) o.base = general_register(r, (sib & 7) | v->b << 3);
    } else if (v->mod == 0 &&
               v->rm == 5) {  // relative to the next instruction: the displacement ends this one
        o.base = (uint64_t)(p + 4);
        no_base = 1;
    } else {
        o.base = general_register(r, v->rm | v->b << 3);
    }
    if (v->mod == 1)
        displacement = (int8_t)*p++;
    else if (v->mod == 2 || no_base)
        displacement = displacement32(&p);
    o.base += (uint64_t)displacement;
    o.length = (int)(p - ip);
    return o;
}

int decode_execute(struct tiles* s, const uint8_t* ip, const greg_t* r) {
    if (!decode_is_amx(ip)) return kNotAmx;
    const struct vex v = parse(ip);
    int result = kIllegal;
    if (v.opcode == kBf16 || v.opcode == kInt8) {
        const int left = v.rm | v.b << 3, sums = v.reg | v.r << 3;
        if (v.opcode == kBf16)
            result = tiles_bf16_product(s, sums, left, v.vvvv);
        else
            result = tiles_int8_product(s, sums, left, v.vvvv, v.pp >= kF3, v.pp == kF2 || v.pp == k66);
        return result ? result : 5;
    }
    if (v.vvvv) return kIllegal;
    if (v.mod == 3) {
        if (v.pp == kF2)
            result = tiles_zero(s, v.reg | v.r << 3);
        else if (!v.r && !v.b)
            result = tiles_release(s);
        return result ? result : 5;
    }
    const struct operand o = address(&v, ip, r);
    if (v.opcode == kConfig) {
        uint8_t* memory = (uint8_t*)(o.base + o.index);
        result = v.pp == kNone ? tiles_load_config(s, memory) : tiles_store_config(s, memory);
    } else if (o.has_sib) {  // tiles are addressed through SIB alone
        const int tile = v.reg | v.r << 3;
        result = v.pp == kF3 ? tiles_store(s, tile, o.base, o.index) : tiles_load(s, tile, o.base, o.index);
    }
    return result ? result : o.length;
}
