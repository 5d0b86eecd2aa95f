// Where threads of the bench stand while another process is timed: the handler of a signal.
//
// Its one idea: a thread that takes its signal stands only as long as `holders` is not 0. So a thread that takes it
// late, or twice, or never, goes on without being told. No thread stands longer than MOST_SECONDS: it may have been
// stopped with a lock that the holding thread needs.

#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace {

constexpr long MOST_SECONDS = 1;

std::atomic<std::uint32_t> holders{0}, standing{0}, changes{0};

void futex(int operation, std::uint32_t value, const timespec* until) {
    syscall(SYS_futex, &changes, operation, value, until, nullptr, FUTEX_BITSET_MATCH_ANY);
}

void stand(int) {
    const int error = errno;
    timespec until, now;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += MOST_SECONDS;
    ++standing;
    for (std::uint32_t seen = changes; holders; seen = changes) {
        futex(FUTEX_WAIT_BITSET_PRIVATE, seen, &until);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec > until.tv_sec || (now.tv_sec == until.tv_sec && now.tv_nsec >= until.tv_nsec)) break;
    }
    --standing;
    errno = error;
}

}  // namespace

extern "C" {

// Takes the signal for this; in a forked child no thread is held. False where the system refuses.
bool prepare(int number) {
    struct sigaction action = {};
    action.sa_handler = stand;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    pthread_atfork(nullptr, nullptr, [] { holders = standing = 0; });
    return sigaction(number, &action, nullptr) == 0;
}

void hold() { ++holders; }

void let_go() {
    --holders;
    ++changes;
    futex(FUTEX_WAKE_BITSET_PRIVATE, INT32_MAX, nullptr);
}

std::uint32_t standing_now() { return standing; }
}
