// A pool of large buffers, in one range of addresses that the kernel fills with pages when they are used.
//
// glibc's heap has two choices for large freed buffers: to return them, so that each further use needs new zeroed pages,
// or to keep them, so that the gaps between them add up. This pool keeps them too, but never holds more pages than the
// buffers in use once needed together: before that happens it returns the pages of gaps, the largest first. Steps of a
// training repeat, so a few per cent of a step's buffers need new pages.
#pragma once

#include "../compiled/native.h"

#include <cstddef>

NATIVE_TEXT(native_text_of_pool_header)

// Buffers that are smaller than this many bytes are left to glibc.
constexpr size_t POOLED = 256 << 10;

// Reserve `capacity` bytes of addresses, and memory for the list of spans. Return whether that succeeded.
bool pool_open(size_t capacity);

// Return a buffer of `size` bytes that begins at a line of 64 bytes, or nullptr if the pool has no place.
void* pool_take(size_t size);

// Free a buffer of the pool; return false if `at` is no address of the pool.
bool pool_give(void* at);
