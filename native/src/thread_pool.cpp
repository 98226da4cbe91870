#include "thread_pool.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <thread>
#include <vector>

namespace ob {
namespace {

// A waiter spins for as long as a quiet machine's others need, then sleeps: whoever shares the core (the server,
// a client, a neighbour) must get it, or the thread that everybody waits for would not run. Spinning on, or
// sched_yield instead of sleeping, makes a step many times longer beside one busy process.
constexpr auto kSpin = std::chrono::microseconds(20);
constexpr int kPausesPerLook = 8;

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// A number that only grows, and can be waited for.
class Epoch {
public:
    uint32_t now() const { return value_.load(std::memory_order_acquire); }

    void advance() {
        value_.fetch_add(1, std::memory_order_seq_cst);
        if (num_sleepers_.load(std::memory_order_seq_cst) > 0) {
            syscall(SYS_futex, address(), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
        }
    }

    void wait_past(uint32_t seen) {
        const auto end = std::chrono::steady_clock::now() + kSpin;
        do {
            for (int i = 0; i < kPausesPerLook; ++i) {
                if (now() != seen) return;
                pause_briefly();
            }
        } while (std::chrono::steady_clock::now() < end);
        num_sleepers_.fetch_add(1, std::memory_order_seq_cst);
        // The kernel compares the value once more: an advance in between is not slept through.
        while (now() == seen) {
            syscall(SYS_futex, address(), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        }
        num_sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }

private:
    uint32_t* address() { return reinterpret_cast<uint32_t*>(&value_); }

    alignas(64) std::atomic<uint32_t> value_{0};
    alignas(64) std::atomic<int> num_sleepers_{0};
};

}  // namespace

class ThreadPool {
public:
    explicit ThreadPool(int num_threads) : num_threads_(num_threads) {
        try {
            for (int thread = 1; thread < num_threads; ++thread) {
                workers_.emplace_back([this, thread] { work(thread); });
            }
        } catch (...) {
            end();
            throw;
        }
    }

    ~ThreadPool() { end(); }

    void run(void (*job)(void*, int), void* argument) {
        job_ = job;
        argument_ = argument;
        jobs_.advance();
        job(argument, 0);
        wait();
    }

    void wait() {
        const uint32_t seen = barriers_.now();
        if (num_waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == num_threads_) {
            num_waiting_.store(0, std::memory_order_relaxed);
            barriers_.advance();
        } else {
            barriers_.wait_past(seen);
        }
    }

private:
    void end() {
        job_ = nullptr;
        jobs_.advance();
        for (auto& worker : workers_) worker.join();
    }

    void work(int thread) {
        for (uint32_t seen = 0;; ++seen) {
            jobs_.wait_past(seen);
            if (job_ == nullptr) return;
            job_(argument_, thread);
            wait();
        }
    }

    const int num_threads_;
    void (*job_)(void*, int) = nullptr;
    void* argument_ = nullptr;
    Epoch jobs_;
    Epoch barriers_;
    alignas(64) std::atomic<int> num_waiting_{0};
    std::vector<std::thread> workers_;
};

ThreadPool* create_thread_pool(int num_threads) { return new ThreadPool(num_threads); }
void destroy_thread_pool(ThreadPool* pool) { delete pool; }
void run_on_all(ThreadPool& pool, void (*job)(void*, int), void* argument) { pool.run(job, argument); }
void wait_for_all(ThreadPool& pool) { pool.wait(); }

}  // namespace ob
