// Threads that share the tasks of a kernel. One implementation for all instruction sets (team.cpp).
#pragma once

#include <cstdint>

namespace bros {

constexpr int kMostThreads = 256;

using TeamTask = void (*)(void* context, int64_t index, int slot);

// Calls task(context, index, slot) for each index in [0, count), and returns when all calls have
// ended. Up to `threads` threads run them, the caller's among them, each with a slot of its own in
// [0, threads). Other threads may call this at the same time; a task may not.
void run_tasks(int64_t count, int threads, TeamTask task, void* context);

}  // namespace bros
