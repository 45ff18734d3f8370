// All kernels, for the instruction set that the including file is compiled for.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "embedding.h"
#include "linear.h"
#include "mlp.h"
#include "sampling.h"

namespace bros {
namespace {

// A part reads all weights of a layer again, so its products have to take longer than that
// (docs/decisions/0024; measured with two threads).
#if defined(BROS_MODEL)
constexpr PartRows kPartRows = {33, 80};  // so that small shapes, which tests use, have parts
#elif defined(BROS_MULTIPLIES_TILES)
constexpr PartRows kPartRows = {192, 384};
#else
constexpr PartRows kPartRows = {64, 128};
#endif

}  // namespace
}  // namespace bros
