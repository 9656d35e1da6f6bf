// The process around the tiles: SIGILL, permission, threads and their counts. See README.md.
#define _GNU_SOURCE
#include "amxemu.h"

#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "decode.h"

enum { kAsk, kDeny, kFree };
enum { kGetSupported = 0x1021, kGetPermitted = 0x1022, kRequest = 0x1023 };  // arch_prctl: XCOMP
enum { kTileData = 18 };
static const uint64_t kStateWithoutTileData = 0x202e7;  // XCR0 of a Sapphire Rapids less bit 18

static int active, single, policy;
static const char* stats_file;
static atomic_int permitted;  // of the process, as in Linux

static int (*libc_sigaction)(int, const struct sigaction*, struct sigaction*);
static int (*libc_pthread_sigmask)(int, const sigset_t*, sigset_t*);
static pthread_mutex_t disposition_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction application;  // what the program wants for SIGILL

// ---- threads ----

// States are never freed, so that the counts of threads that ended stay; a new thread takes over a free one.
struct thread {
    struct tiles tiles;
    atomic_int taken;
    struct thread* next;
};
static _Atomic(struct thread*) threads;
static pthread_key_t thread_end;
static __thread struct thread* self __attribute__((tls_model("initial-exec")));

static void give_back(void* thread) {
    self = NULL;
    atomic_store(&((struct thread*)thread)->taken, 0);
}

static struct thread* this_thread(void) {
    if (self) return self;
    struct thread* t = atomic_load(&threads);
    for (; t; t = t->next) {
        int expected = 0;
        if (atomic_compare_exchange_strong(&t->taken, &expected, 1)) break;
    }
    if (!t) {
        t = mmap(NULL, sizeof *t, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (t == MAP_FAILED) abort();
        atomic_store(&t->taken, 1);
        t->next = atomic_load(&threads);
        while (!atomic_compare_exchange_weak(&threads, &t->next, t)) {
        }
    }
    const struct amxemu_counts kept = t->tiles.counts;
    memset(&t->tiles, 0, sizeof t->tiles);
    t->tiles.counts = kept;
    pthread_setspecific(thread_end, t);
    return self = t;
}

void amxemu_counts(struct amxemu_counts* total) {
    memset(total, 0, sizeof *total);
    for (struct thread* t = atomic_load(&threads); t; t = t->next) {
#define ADD(name) total->name += __atomic_load_n(&t->tiles.counts.name, __ATOMIC_RELAXED);
        AMXEMU_COUNTERS(ADD)
#undef ADD
    }
}

int amxemu_active(void) { return active; }

int amxemu_configured(void) {
    int n = 0;
    for (struct thread* t = atomic_load(&threads); t; t = t->next)
        n += __atomic_load_n(&t->tiles.palette, __ATOMIC_RELAXED) != 0;
    return n;
}

static void after_fork(void) {  // in the child: its one thread goes on, the parent's counts are not its own
    for (struct thread* t = atomic_load(&threads); t; t = t->next) {
        memset(&t->tiles.counts, 0, sizeof t->tiles.counts);
        atomic_store(&t->taken, t == self);
    }
}

static void write_counts(void) {
    struct amxemu_counts c;
    amxemu_counts(&c);
    if (!c.signals) return;
    char line[1024];
    int n = snprintf(line, sizeof line, "{\"pid\": %d", (int)getpid());
#define PRINT(name) \
    n += snprintf(line + n, sizeof line - n, ", \"%s\": %llu", #name, (unsigned long long)c.name);
    AMXEMU_COUNTERS(PRINT)
#undef PRINT
    n += snprintf(line + n, sizeof line - n, "}\n");
    int file = STDOUT_FILENO;
    if (strcmp(stats_file, "-") != 0)
        file = open(stats_file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file < 0 || write(file, line, n) != n) perror("amxemu: AMXEMU_STATS");
    if (file > STDERR_FILENO) close(file);
}

// ---- the signal ----

static void complain(const char* what, const uint8_t* ip) {
    char text[256];
    int n = snprintf(text, sizeof text, "amxemu: %s at %p:", what, (const void*)ip);
    const int shown = 4096 - ((uintptr_t)ip & 4095) < 10 ? 5 : 10;  // the next page may not be there
    for (int i = 0; i < shown; i++) n += snprintf(text + n, sizeof text - n, " %02x", ip[i]);
    text[n++] = '\n';
    if (write(STDERR_FILENO, text, n) < 0) return;
}

// Hands the signal on: to the application's handler, or by the default action, which ends the process.
static void pass_on(int result, int signal, siginfo_t* info, void* context, const uint8_t* ip) {
    pthread_mutex_lock(&disposition_lock);
    const struct sigaction wanted = application;
    pthread_mutex_unlock(&disposition_lock);
    const int handled = wanted.sa_handler != SIG_DFL && wanted.sa_handler != SIG_IGN;
    if (result == kIllegal) complain("this tile instruction is illegal in the current configuration", ip);
    if (result == kForbidden) complain("tiles used without permission: Linux would not let it", ip);
    if (result == kBadConfig) complain("LDTILECFG of a bad configuration", ip);
    if (result == kNotAmx && !handled) complain("SIGILL of no instruction that is emulated", ip);
    if (result != kBadConfig && handled) {
        if (wanted.sa_flags & SA_SIGINFO)
            wanted.sa_sigaction(signal, info, context);
        else
            wanted.sa_handler(signal);
        return;
    }
    const struct sigaction standard = {.sa_handler = SIG_DFL};
    libc_sigaction(SIGILL, &standard, NULL);  // on return the instruction raises it again
    if (result == kBadConfig) {
        libc_sigaction(SIGSEGV, &standard, NULL);
        raise(SIGSEGV);
    }
}

static void on_sigill(int signal, siginfo_t* info, void* context) {
    const int saved_errno = errno;
    greg_t* const r = ((ucontext_t*)context)->uc_mcontext.gregs;
    struct tiles* const s = &this_thread()->tiles;
    tiles_count(&s->counts.signals, 1);
    int done = 0, result = kNotAmx;
    for (;;) {
        const uint8_t* ip = (const uint8_t*)r[REG_RIP];
        if (policy != kFree && !atomic_load(&permitted) && decode_is_amx(ip)) {
            result = kForbidden;
        } else {
            result = decode_execute(s, ip, r);
        }
        if (result <= 0) break;
        done = 1;
        r[REG_RIP] += result;
        ip += result;
        // The next one too if it is known without touching another page, which may not be there.
        if (single || ((uintptr_t)ip & 4095) > 4080 || !decode_is_amx(ip)) break;
    }
    errno = saved_errno;
    // After some progress a bad instruction raises the signal again and is reported then.
    if (result <= 0 && !done) pass_on(result, signal, info, context, (const uint8_t*)r[REG_RIP]);
}

// ---- what is replaced in libc ----

static void find_libc(void) {
    if (!libc_sigaction) *(void**)&libc_sigaction = dlsym(RTLD_NEXT, "sigaction");
    if (!libc_pthread_sigmask) *(void**)&libc_pthread_sigmask = dlsym(RTLD_NEXT, "pthread_sigmask");
}

int sigaction(int signal, const struct sigaction* wanted, struct sigaction* previous) {
    find_libc();
    if (signal != SIGILL || !active) return libc_sigaction(signal, wanted, previous);
    pthread_mutex_lock(&disposition_lock);
    const struct sigaction old = application;
    if (wanted) application = *wanted;
    pthread_mutex_unlock(&disposition_lock);
    if (previous) *previous = old;
    return 0;
}

sighandler_t signal(int number, sighandler_t handler) {
    struct sigaction wanted = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
    sigemptyset(&wanted.sa_mask);
    return sigaction(number, &wanted, &old) ? SIG_ERR : old.sa_handler;
}

// A blocked SIGILL of a faulting instruction kills the process: it stays unblocked.
int pthread_sigmask(int how, const sigset_t* set, sigset_t* previous) {
    find_libc();
    sigset_t allowed;
    if (set && active && how != SIG_UNBLOCK) {
        allowed = *set;
        sigdelset(&allowed, SIGILL);
        set = &allowed;
    }
    return libc_pthread_sigmask(how, set, previous);
}

int sigprocmask(int how, const sigset_t* set, sigset_t* previous) {
    const int error = pthread_sigmask(how, set, previous);
    if (!error) return 0;
    errno = error;
    return -1;
}

// arch_prctl's part about tile data; anything else goes to the kernel.
static int answers(long number, long code, long argument, long* result) {
    if (number != SYS_arch_prctl || !active) return 0;
    *result = 0;
    if (code == kRequest && argument == kTileData) {
        if (policy == kDeny)
            *result = -EPERM;
        else
            atomic_store(&permitted, 1);
        return 1;
    }
    if (code != kGetSupported && code != kGetPermitted) return 0;
    const int with = code == kGetSupported || atomic_load(&permitted);
    *(uint64_t*)argument = kStateWithoutTileData | (uint64_t)with << kTileData;
    return 1;
}

long syscall(long number, ...) {
    va_list list;
    va_start(list, number);
    const long a = va_arg(list, long), b = va_arg(list, long), c = va_arg(list, long);
    const long d = va_arg(list, long), e = va_arg(list, long), f = va_arg(list, long);
    va_end(list);
    long result;
    if (!answers(number, a, b, &result)) {
        register long r10 __asm__("r10") = d;
        register long r8 __asm__("r8") = e;
        register long r9 __asm__("r9") = f;
        __asm__ volatile("syscall"
                         : "=a"(result)
                         : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                         : "rcx", "r11", "memory");
    }
    if ((unsigned long)result > -4096ul) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

// ---- begin and end ----

static int cpu_has_amx(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1);
}

__attribute__((constructor)) static void begin(void) {
    find_libc();
    const char* permission = getenv("AMXEMU_PERMISSION");
    if (permission && !strcmp(permission, "deny")) policy = kDeny;
    if (permission && !strcmp(permission, "free")) policy = kFree;
    single = getenv("AMXEMU_SINGLE") != NULL;
    if (cpu_has_amx() && policy != kDeny) return;
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        fputs("amxemu: needs AVX2 and FMA\n", stderr);
        return;
    }
    if (pthread_key_create(&thread_end, give_back) || pthread_atfork(NULL, NULL, after_fork)) abort();
    struct sigaction ours = {.sa_sigaction = on_sigill, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    active = libc_sigaction(SIGILL, &ours, &application) == 0;
    stats_file = getenv("AMXEMU_STATS");
}

__attribute__((destructor)) static void end(void) {
    if (active && stats_file) write_counts();
}
