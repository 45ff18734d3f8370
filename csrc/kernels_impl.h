// All kernels, for the instruction set that the including file is compiled for.
#pragma once

#include "attention.h"
#include "elementwise.h"
#include "embedding.h"
#include "linear.h"
#include "mlp.h"
#include "sampling.h"
