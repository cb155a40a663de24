// Register tiles whose rows each have a panel of their own (own_tiles.cpp).
#pragma once
#include "tiles.h"

namespace loraplex {

constexpr int kOwnRows = 4;  // at most

// Semantics: C_i += H_i B_i, i being some rows and B_i panels of k inputs and one width. Each row's
// sum is what `product` makes of it.
typedef void (*OwnTile)(const void* const* h, const char* const* b, int64_t k, float* const* c);

OwnTile choose_own_tile(Read read, int rows, int vectors);

}  // namespace loraplex
