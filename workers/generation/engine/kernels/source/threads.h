// A team of threads that run the same function together, phase by phase.
//
// Spinning is bounded: a thread that has waited for SPIN_NS sleeps in the kernel until it is needed, because the cores
// may be shared with other processes. Work is claimed piece by piece, so that a thread that lost its core holds up no
// more than the piece it is at.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace gea {

constexpr int64_t SPIN_NS = 50'000;  // some wake-ups: longer than any imbalance between two phases of a step
constexpr int MAX_THREADS = 256;

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

inline int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}

// A number that threads wait to see changed.
class Signal {
  public:
    uint32_t value() const { return value_.load(std::memory_order_acquire); }

    void raise() {
        value_.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
    }

    void wait_beyond(uint32_t seen) {
        if (has_changed_within_spin(seen)) return;
        sleepers_.fetch_add(1, std::memory_order_seq_cst);
        while (value() == seen) sleep(seen);
        sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }

  private:
    bool has_changed_within_spin(uint32_t seen) const {
        int64_t limit = 0;
        do {
            for (int i = 0; i < 64; i++) {
                if (value() != seen) return true;
                pause_cpu();
            }
            if (limit == 0) limit = now_ns() + SPIN_NS;
        } while (now_ns() < limit);
        return false;
    }

#ifdef __linux__
    void sleep(uint32_t seen) { syscall(SYS_futex, &value_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE_PRIVATE, MAX_THREADS, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { sched_yield(); }
    void wake() {}
#endif

    alignas(64) std::atomic<uint32_t> value_{0};
    std::atomic<int> sleepers_{0};
};

// Threads 1 and up are the team's own, thread 0 is the caller of `run`. One caller at a time.
class Team {
  public:
    // Null where the system has no memory or no threads left.
    static Team *create(int num_threads) {
        Team *team = new (std::nothrow) Team(std::clamp(num_threads, 1, MAX_THREADS));
        if (team == nullptr || team->start()) return team;
        delete team;
        return nullptr;
    }

    ~Team() {
        is_ending_ = true;
        work_.raise();
        for (int i = 0; i < num_started_; i++) pthread_join(threads_[i], nullptr);
    }

    Team(const Team &) = delete;
    Team &operator=(const Team &) = delete;

    int size() const { return size_; }

    // Runs body(thread) on every thread at once; back when all have returned.
    template <class Body>
    void run(Body &body) {
        context_ = &body;
        call_ = [](void *context, int thread) { (*static_cast<Body *>(context))(thread); };
        if (size_ > 1) work_.raise();
        call_(context_, 0);
        barrier();
    }

    // To be called by all threads of a running body: body(first, last) for pieces of 0 … count - 1, until all are done.
    // The first pieces are large, up to `most`, for long reads in order; the last ones small, so that all end together.
    template <class Body>
    void share(int64_t count, int64_t most, Body &&body) {
        int64_t first = next_.load(std::memory_order_relaxed);
        while (first < count) {
            int64_t last = first + std::clamp<int64_t>((count - first) / (3 * size_), 1, most);
            if (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
            body(first, last);
            first = next_.load(std::memory_order_relaxed);
        }
        barrier();
    }

    // Back when all threads of a running body have come here; what they wrote before is then seen by all.
    void barrier() {
        if (size_ == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        uint32_t seen = passed_.value();
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            passed_.raise();
        } else {
            passed_.wait_beyond(seen);
        }
    }

  private:
    struct Seat {
        Team *team;
        int thread;
    };

    explicit Team(int size) : size_(size) {}

    bool start() {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to the process' other threads
        for (int i = 1; i < size_; i++) {
            seats_[i] = {this, i};
            if (pthread_create(&threads_[num_started_], nullptr, live, &seats_[i]) != 0) break;
            num_started_++;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return num_started_ == size_ - 1;
    }

    static void *live(void *argument) {
        Seat *seat = static_cast<Seat *>(argument);
        Team *team = seat->team;
        for (uint32_t seen = 0;; seen++) {
            team->work_.wait_beyond(seen);
            if (team->is_ending_) return nullptr;
            team->call_(team->context_, seat->thread);
            team->barrier();
        }
    }

    const int size_;
    int num_started_ = 0;
    bool is_ending_ = false;
    void *context_ = nullptr;
    void (*call_)(void *, int) = nullptr;
    Signal work_;
    Signal passed_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    pthread_t threads_[MAX_THREADS];
    Seat seats_[MAX_THREADS];
};

}  // namespace gea
