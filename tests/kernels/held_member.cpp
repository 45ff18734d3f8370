// Jobs of a team of threads of which one is held up. A team that waited for it would never end.
#include <csignal>
#include <cstdio>
#include <unistd.h>

#include "../../csrc/team.cpp"

namespace {

constexpr int kThreads = 3, kHeld = 1;

int held[2], go_on[2];  // pipes
std::atomic<pthread_t> member{0};

void hold(int) {
  char byte = 0;
  if (write(held[1], &byte, 1) != 1 || read(go_on[0], &byte, 1) != 1) _exit(3);
}

struct Work {
  std::atomic<int64_t> done{0};
  std::atomic<int64_t> by_held{0};
};

// Waits until each slot has a task, so that the member is known.
void meet(void* context, int64_t, int slot) {
  if (slot == kHeld) member.store(pthread_self());
  auto* arrived = static_cast<std::atomic<int>*>(context);
  arrived->fetch_add(1);
  while (arrived->load() < kThreads) usleep(10);
}

void count(void* context, int64_t, int slot) {
  auto* work = static_cast<Work*>(context);
  work->done.fetch_add(1);
  if (slot == kHeld) work->by_held.fetch_add(1);
}

}  // namespace

int main() {
  struct sigaction action = {};
  action.sa_handler = hold;
  sigaction(SIGPROF, &action, nullptr);
  if (pipe(held) || pipe(go_on)) return 2;
  std::atomic<int> arrived{0};
  bros::run_tasks(kThreads, kThreads, meet, &arrived);
  char byte = 0;
  if (pthread_kill(member.load(), SIGPROF) || read(held[0], &byte, 1) != 1) return 2;
  Work work;
  for (int64_t tasks = 2; tasks < 300; ++tasks) bros::run_tasks(tasks, kThreads, count, &work);
  if (work.done.load() != 299 * 300 / 2 - 1 || work.by_held.load() != 0) return 1;
  if (write(go_on[1], &byte, 1) != 1) return 2;
  std::atomic<int> again{0};
  bros::run_tasks(kThreads, kThreads, meet, &again);  // ends only with all of them
  printf("ended\n");
}
