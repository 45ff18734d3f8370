// A team of threads per calling thread. The caller waits only for tasks that have begun.
//
// Each slot (a thread's place in the team) has a share of the tasks of a job. A thread first takes
// those of its own slot, then what the others have left:
//
//     tasks     0  1  2  3  4  5  6      slot 0 (the caller)  0 3 6
//     slots     0  1  2  0  1  2  0      slot 1               1 4
//                                        slot 2               2 5
//
// So a slot has the same tasks in each job of this form, and what it reads may still be in its
// core's cache. But a thread that sleeps, or whose core runs something else, holds nothing up: the
// others do its tasks, and only tasks that have begun are waited for. With OpenMP, whose barriers
// wait for each thread of a team, decode steps beside a busy process on one of two cores took up to
// a hundred times as long: a thread that wakes up there waits for some milliseconds until its core
// is free, in each of 240 parallel regions of a step.
//
// Threads that wait spin first, since work comes soon, and then sleep, so that other processes, and
// the thread that is waited for, get the core. Each sleeps on a condition variable of its own: with
// one for all, glibc makes a broadcast wait for threads of the one before that have not run yet.
#include "team.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <initializer_list>
#include <new>

namespace bros {
namespace {

// For how long a thread spins before it sleeps, and after how many rounds it looks at the clock.
// docs/decisions/0028 compares other times.
constexpr int64_t kSpinNs = 60000;
constexpr int kRounds = 64;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#endif
}

inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

// Whether `ready` became true while this thread was spinning.
template <class Ready>
bool spins_until(const Ready& ready) {
  int64_t end = 0;
  do {
    for (int i = 0; i < kRounds; ++i) {
      if (ready()) return true;
      relax();
    }
    if (end == 0) end = now_ns() + kSpinNs;
  } while (now_ns() < end);
  return ready();
}

constexpr size_t kStackBytes = 2 * 1024 * 1024;  // some systems give less than kernels take

// How often this process is the child of a fork. The threads of a team stay in the parent.
std::atomic<uint32_t> forks{0};

[[maybe_unused]] const int counts_forks =
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

// The sleep of one thread.
class Sleep {
 public:
  template <class Ready>
  void until(const Ready& ready) {
    pthread_mutex_lock(&mutex_);
    for (;;) {
      asleep_.store(true);  // before `ready`: a thread that makes it true looks at asleep_ after
      if (ready()) break;
      pthread_cond_wait(&wakes_, &mutex_);
    }
    asleep_.store(false);
    pthread_mutex_unlock(&mutex_);
  }

  // Call it after what makes `ready` true.
  void wake() {
    if (!asleep_.load() || !asleep_.exchange(false)) return;
    pthread_mutex_lock(&mutex_);  // it waits, or will look at `ready` again
    pthread_mutex_unlock(&mutex_);
    pthread_cond_signal(&wakes_);
  }

 private:
  std::atomic<bool> asleep_{false};
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wakes_ = PTHREAD_COND_INITIALIZER;
};

class Team {
 public:
  Team() : forks_(forks.load()) {}

  // Ends the threads. They must have no task.
  ~Team() {
    ends_.store(true);
    for (int slot = 1; slot < size_; ++slot) members_[slot].sleep.wake();
    for (int slot = 1; slot < size_; ++slot) pthread_join(members_[slot].thread, nullptr);
  }

  bool is_of_parent() const { return forks_ != forks.load(std::memory_order_relaxed); }

  void run(int64_t count, int threads, TeamTask task, void* context) {
    while (size_ < threads && !is_full_) is_full_ = !add_member();
    const int width = threads < size_ ? threads : size_;
    task_ = task;
    context_ = context;
    count_ = count;
    width_ = width;
    done_.store(0, std::memory_order_relaxed);
    const uint64_t job = ++job_;  // wraps around: no thread stops inside `take` for 4 billion jobs
    for (int slot = 0; slot < width; ++slot) {
      left_[slot].store(job << 32 | share(slot), std::memory_order_release);
    }
    announced_.store(job << 32 | static_cast<uint32_t>(width));
    for (int slot = 1; slot < width; ++slot) members_[slot].sleep.wake();
    work(job, width, 0);
    const auto all_done = [&] { return done_.load(std::memory_order_acquire) == count; };
    if (spins_until(all_done)) return;
    members_[0].sleep.until([&] { return done_.load() == count; });
  }

 private:
  struct alignas(64) Member {
    Sleep sleep;
    Team* team;
    int slot;
    pthread_t thread;
  };

  // The job's number << 32 | tasks of a slot that nobody has taken. Each has a line of the cache.
  struct alignas(64) Left : std::atomic<uint64_t> {};

  uint32_t share(int slot) const {
    return slot < count_ ? static_cast<uint32_t>((count_ - slot + width_ - 1) / width_) : 0;
  }

  bool add_member() {
    members_[size_].team = this;
    members_[size_].slot = size_;
    // Signals are for other threads, but for those of crashes and of profilers.
    sigset_t all, before;
    sigfillset(&all);
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGPROF}) {
      sigdelset(&all, own);
    }
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, kStackBytes);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = pthread_create(&members_[size_].thread, &attributes, serve, &members_[size_]);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    if (error) return false;  // fewer threads do the work
    ++size_;
    return true;
  }

  static void* serve(void* member) {
    static_cast<Member*>(member)->team->serve(static_cast<Member*>(member)->slot);
    return nullptr;
  }

  void serve(int slot) {
    uint64_t seen = 0;
    while (next_job(slot, &seen)) work(seen >> 32, static_cast<int>(seen & UINT32_MAX), slot);
  }

  // Waits for a job after `seen` that this slot has a part in; false at the end of the team.
  bool next_job(int slot, uint64_t* seen) {
    const auto has_come = [&] {
      const uint64_t job = announced_.load();
      return (job != *seen && slot < static_cast<int>(job & UINT32_MAX)) || ends_.load();
    };
    if (!spins_until(has_come)) members_[slot].sleep.until(has_come);
    *seen = announced_.load(std::memory_order_acquire);  // perhaps a later one, without this slot
    if (slot >= static_cast<int>(*seen & UINT32_MAX)) *seen = 0;
    return !ends_.load();
  }

  // Does tasks of a job until no slot has any left. The job may have ended long ago.
  void work(uint64_t job, int width, int slot) {
    for (int i = 0; i < width; ++i) {
      const int owner = slot + i < width ? slot + i : slot + i - width;
      int64_t number;
      while (take(job, owner, &number)) {
        task_(context_, owner + number * width, slot);
        const int64_t count = count_;  // of this job as long as this task is not counted
        if (done_.fetch_add(1) + 1 == count) members_[0].sleep.wake();
      }
    }
  }

  // Takes a task of `owner`; number: how many of its share were taken before.
  bool take(uint64_t job, int owner, int64_t* number) {
    uint64_t left = left_[owner].load(std::memory_order_acquire);
    while (left >> 32 == job && (left & UINT32_MAX) > 0) {
      if (left_[owner].compare_exchange_weak(left, left - 1, std::memory_order_acq_rel,
                                             std::memory_order_acquire)) {
        *number = share(owner) - static_cast<int64_t>(left & UINT32_MAX);
        return true;
      }
    }
    return false;
  }

  // What the caller writes, and members only wait for.
  alignas(64) std::atomic<uint64_t> announced_{0};  // the job's number << 32 | its width
  std::atomic<bool> ends_{false};

  // Of a job. Nobody reads these without a task of it, and while there is one nobody writes them.
  alignas(64) TeamTask task_ = nullptr;
  void* context_ = nullptr;
  int64_t count_ = 0;
  int width_ = 0;  // threads that may take tasks

  alignas(64) std::atomic<int64_t> done_{0};

  Left left_[kMostThreads] = {};
  Member members_[kMostThreads];  // the first one is the caller
  int size_ = 1;
  bool is_full_ = false;  // no further thread could be created
  uint32_t job_ = 0;
  const uint32_t forks_;
};

// The team of a thread, which ends with it.
struct Owner {
  Team* team = nullptr;
  ~Owner() {
    if (team && !team->is_of_parent()) delete team;
  }
};

// Null if there is no memory.
Team* team_of_this_thread() {
  static thread_local Owner owner;
  if (!owner.team || owner.team->is_of_parent()) owner.team = new (std::nothrow) Team;
  return owner.team;
}

}  // namespace

void run_tasks(int64_t count, int threads, TeamTask task, void* context) {
  const int most = threads < kMostThreads ? threads : kMostThreads;
  const int useful = count < most ? static_cast<int>(count) : most;
  if (Team* team = useful > 1 ? team_of_this_thread() : nullptr) {
    return team->run(count, useful, task, context);
  }
  for (int64_t i = 0; i < count; ++i) task(context, i, 0);
}

}  // namespace bros
