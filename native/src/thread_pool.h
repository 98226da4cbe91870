// Threads that run one job together, and wait for one another without holding a core for long.
#pragma once

namespace ob {

class ThreadPool;

// Throws std::system_error where a thread cannot be started; then none is left.
ThreadPool* create_thread_pool(int num_threads);
void destroy_thread_pool(ThreadPool* pool);

// Runs `job(argument, thread)` on every thread, 0 being the caller, and returns when all are done.
void run_on_all(ThreadPool& pool, void (*job)(void* argument, int thread), void* argument);

// Returns once every thread of the job has called it; what they wrote before is then seen by all.
void wait_for_all(ThreadPool& pool);

}  // namespace ob
