// One section of a step's writes, `plan::WriteTable`, and the addresses of its pages.

#pragma once

#include "common/tile.cuh"

// Whether keys are centred. The slot of the centre follows that of the token in its word.
#ifndef KEY_CENTRED
#define KEY_CENTRED 0
#endif

constexpr int MOST_STEP_SHARDS = 16;

struct WriteCall {
    // The section. The first word of its first entry holds the number of the entries that follow.
    const uint4* table;
    // Dense elements of types `key_type` and `value_type`.
    const void* keys;
    const void* values;
    // Strides in elements.
    u64 token_stride;
    u64 head_stride;
    // The first token whose keys, and the first whose values, could not be stored.
    u32* flags;
    // Span ranges, [slot][kv head][channel] of (scale, minimum).
    float2* key_ranges;
    float2* value_ranges;
    u32 kv_heads;
    u32 key_type;
    u32 value_type;
    // The largest element that is stored exactly.
    float key_largest;
    float value_largest;
    float key_shrink;
    float value_shrink;
    // Maximum number of entries of the section.
    u32 capacity;
    // Number of blocks in a row with work, if the launch overlaps with the previous one; 0 if it waits for that.
    u32 beside;
    u32 unused;
    // [slot][kv head][channel], if keys are centred.
    float* centres;
    // Addresses of the shards that are written, and of those that windows are read from.
    u64 shards[MOST_STEP_SHARDS];
    u64 from_shards[MOST_STEP_SHARDS];
};

__device__ __forceinline__ u32 entry_count(const WriteCall& call) { return call.table[0].x; }

__device__ __forceinline__ uint4 entry_at(const WriteCall& call, u32 index) { return call.table[1 + index]; }

// The slot of a token in its page, and that of its centre or of the centre that a mean becomes.
__device__ __forceinline__ u32 token_slot(uint4 entry) { return KEY_CENTRED ? entry.z & 0xffu : entry.z; }

__device__ __forceinline__ u32 centre_slot(uint4 entry) { return entry.z >> 8; }

// The part of a page that belongs to one KV head.
__device__ __forceinline__ u8* page_part(const WriteCall& call, u32 shard, u32 page, u32 kv_head) {
    return (u8*)call.shards[shard] + ((u64)page * call.kv_heads + kv_head) * HEAD_BYTES;
}
