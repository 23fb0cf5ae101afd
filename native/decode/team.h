// Threads that share the pieces of a list of tasks. A task begins when all pieces of the previous one are done; it
// does not wait for threads without a piece, so a thread that lost its core to another program seldom delays the others.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>

#include "../compiled/native.h"

NATIVE_TEXT(native_text_of_team)

namespace {

// Work on one piece of one task.
using Compute = void (*)(const void* context, int64_t task, int64_t piece, int thread);

constexpr int64_t MOST_TASKS = 4096;
constexpr int MOST_THREADS = 256;
constexpr int SPINS = 1000;  // pauses, about 20 microseconds, before a waiting thread lets others run
constexpr uint64_t ALL_TAKEN = 0xffffffff;

NATIVE_INLINE void pause_briefly() {
#ifdef NATIVE_X86
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// `next` holds the number of the list in its upper half and the next piece in its lower one, so that a thread that comes
// late to an old list cannot take a piece of a new one.
struct alignas(64) Shared {
    std::atomic<uint64_t> next{0};
    std::atomic<uint32_t> done{0}, count{0};
};

class Team {
public:
    // Work through `tasks` tasks of counts[i] pieces each. A second caller at the same time works alone.
    void run(const void* context, Compute compute, const uint32_t* counts, int64_t tasks, int threads) {
        if (threads == 1 || tasks > MOST_TASKS || !enter(threads)) {
            for (int64_t i = 0; i < tasks; ++i)
                for (uint32_t piece = 0; piece < counts[i]; ++piece) compute(context, i, piece, 0);
            return;
        }
        const uint32_t list = list_.load(std::memory_order_relaxed) + 1;
        context_.store(context, std::memory_order_relaxed);
        compute_.store(compute, std::memory_order_relaxed);
        tasks_.store(tasks, std::memory_order_relaxed);
        for (int64_t i = 0; i < tasks; ++i) {
            Shared& task = tasks_shared_[i];
            // No thread can take a piece between here and the last line.
            task.next.store(upper(list) | ALL_TAKEN);
            task.count.store(counts[i]);
            task.done.store(0);
            task.next.store(upper(list));
        }
        pthread_mutex_lock(&mutex_);
        wanted_ = threads;
        list_.store(list, std::memory_order_release);
        pthread_cond_broadcast(&changed_);
        pthread_mutex_unlock(&mutex_);
        work(list, 0);
        pthread_mutex_unlock(&busy_);
    }

private:
    static uint64_t upper(uint32_t list) { return static_cast<uint64_t>(list) << 32; }

    // Return whether this caller has the team for itself and the team's threads run.
    bool enter(int threads) {
        if (pthread_mutex_trylock(&busy_)) return false;
        if (helpers_ && process_ != getpid()) {  // a fork has no helpers
            pthread_mutex_unlock(&busy_);
            return false;
        }
        process_ = getpid();
        // Helpers block all signals, because Python handles them on its main thread.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (helpers_ < threads - 1 && helpers_ < MOST_THREADS - 1) {
            entries_[helpers_] = {this, helpers_ + 1};
            pthread_t thread;
            if (pthread_create(&thread, nullptr, help, &entries_[helpers_])) break;
            pthread_detach(thread);
            ++helpers_;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return true;
    }

    static void* help(void* entry) {
        const Entry own = *static_cast<Entry*>(entry);
        own.team->follow(own.thread);
        return nullptr;
    }

    // Work on each new list.
    void follow(int thread) {
        uint32_t seen = 0;
        for (;;) {
            for (int i = 0; i < SPINS && list_.load(std::memory_order_acquire) == seen; ++i) pause_briefly();
            pthread_mutex_lock(&mutex_);
            while (list_.load(std::memory_order_relaxed) == seen) pthread_cond_wait(&changed_, &mutex_);
            seen = list_.load(std::memory_order_relaxed);
            const bool wanted = thread < wanted_;
            pthread_mutex_unlock(&mutex_);
            if (wanted) work(seen, thread);
        }
    }

    void work(uint32_t list, int thread) {
        const int64_t tasks = tasks_.load(std::memory_order_relaxed);
        for (int64_t i = 0; i < tasks; ++i) {
            Shared& task = tasks_shared_[i];
            uint64_t next = task.next.load();
            while (next >> 32 == list && (next & ALL_TAKEN) < task.count.load()) {
                if (task.next.compare_exchange_weak(next, next + 1)) {
                    // The list stays as it is while this piece is not done.
                    const Compute compute = compute_.load(std::memory_order_relaxed);
                    compute(context_.load(std::memory_order_relaxed), i, static_cast<int64_t>(next & ALL_TAKEN), thread);
                    task.done.fetch_add(1);
                    next = task.next.load();
                }
            }
            for (int spins = 0; task.next.load() >> 32 == list && task.done.load() < task.count.load(); ++spins) {
                if (spins < SPINS) pause_briefly();
                else sched_yield();
            }
            if (task.next.load() >> 32 != list) return;
        }
    }

    struct Entry {
        Team* team;
        int thread;
    };

    Shared tasks_shared_[MOST_TASKS];
    Entry entries_[MOST_THREADS];
    std::atomic<uint32_t> list_{0};
    std::atomic<const void*> context_{nullptr};
    std::atomic<Compute> compute_{nullptr};
    std::atomic<int64_t> tasks_{0};
    int wanted_ = 0, helpers_ = 0;
    pid_t process_ = 0;
    pthread_mutex_t busy_ = PTHREAD_MUTEX_INITIALIZER, mutex_ = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed_ = PTHREAD_COND_INITIALIZER;
};

}  // namespace
