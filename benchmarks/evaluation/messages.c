// Counts what a process sends through TCP: preloaded (LD_PRELOAD), it takes the place of the
// functions of the C library that send. A message is one call of them that sends something.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long messages, bytes;

long sent_messages(void) { return messages; }
long sent_bytes(void) { return bytes; }

static ssize_t count(int file, ssize_t sent)
{
    int domain = 0;
    socklen_t size = sizeof domain;
    if (sent > 0 && !getsockopt(file, SOL_SOCKET, SO_DOMAIN, &domain, &size)
        && (domain == AF_INET || domain == AF_INET6)) {
        messages++;
        bytes += sent;
    }
    return sent;
}

// A function that calls that of the C library, looked up at the first call, and counts.
#define COUNTED(name, parameters, ...)                        \
    ssize_t name parameters                                   \
    {                                                         \
        static __typeof__(&name) next;                        \
        if (!next)                                            \
            next = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
        return count(file, next(__VA_ARGS__));                \
    }

COUNTED(write, (int file, const void *data, size_t size), file, data, size)
COUNTED(writev, (int file, const struct iovec *parts, int number), file, parts, number)
COUNTED(send, (int file, const void *data, size_t size, int flags), file, data, size, flags)
COUNTED(sendto, (int file, const void *data, size_t size, int flags, const struct sockaddr *to,
        socklen_t length), file, data, size, flags, to, length)
COUNTED(sendmsg, (int file, const struct msghdr *message, int flags), file, message, flags)
