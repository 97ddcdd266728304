/* Shared memory of torch's file_system strategy.
 *
 * An object is a header of 64 bytes that begins with an atomic 32-bit count, then the bytes of one
 * storage. The producer's storage holds one count; serialising the storage adds one that belongs to
 * the payload; a reader gives that one back, and who takes the count to zero removes the object. A
 * reader of torch's own adds one while it has the object mapped; here the bytes are copied in the
 * same call, under the payload's count. */
#include "format/torch_pickle.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HEADER 64
#define MAX_NAME 100

/* "/torch_" and then digits, letters and underscores: no path, nobody else's object. */
static bool copy_name(const unsigned char *name, uint64_t size, char out[MAX_NAME + 1]) {
    static const char prefix[] = "/torch_";
    size_t n = sizeof prefix - 1;
    if (size <= n || size > MAX_NAME || memcmp(name, prefix, n) != 0)
        return false;
    for (uint64_t i = n; i < size; i++)
        if (!isalnum(name[i]) && name[i] != '_')
            return false;
    memcpy(out, name, size);
    out[size] = '\0';
    return true;
}

/* By reads, not through a mapping: an object that is cut meanwhile is an error, not a signal. */
static hr_status copy_bytes(int fd, const char *name, unsigned char *data, uint64_t bytes,
                            hr_error *err) {
    uint64_t done = 0;
    while (done < bytes) {
        ssize_t n = pread(fd, data + done, bytes - done, (off_t)(HEADER + done));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return hr_fail(err, HR_ERR_IO, "shared memory %s of the payload cannot be read: %s",
                           name, n == 0 ? "it ends early" : strerror(errno));
        done += (uint64_t)n;
    }
    return HR_OK;
}

static hr_status give_back(int fd, const char *name, hr_error *err) {
    void *header = mmap(NULL, HEADER, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (header == MAP_FAILED)
        return hr_fail(err, HR_ERR_IO, "shared memory %s of the payload cannot be mapped: %s", name,
                       strerror(errno));
    _Atomic int32_t *count = header;
    int32_t was = atomic_load(count);
    /* Never below zero, whoever counted wrong. */
    while (was > 0 && !atomic_compare_exchange_weak(count, &was, was - 1)) {
    }
    munmap(header, HEADER);
    if (was == 1)
        shm_unlink(name);
    return HR_OK;
}

static hr_status check_object(int fd, const char *name, uint64_t bytes, hr_error *err) {
    struct stat about;
    if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode))
        return hr_fail(err, HR_ERR_IO, "shared memory %s of the payload is not a memory object",
                       name);
    if (about.st_size < HEADER || (uint64_t)about.st_size - HEADER < bytes)
        return hr_fail(err, HR_ERR_CORRUPT,
                       "shared memory %s of the payload has %lld bytes; wanted are %d of header "
                       "and %llu of storage",
                       name, (long long)about.st_size, HEADER, (unsigned long long)bytes);
    return HR_OK;
}

static hr_status refuse_open(const char *name, int error, hr_error *err) {
    if (error == ENOENT)
        return hr_fail(err, HR_ERR_NOT_FOUND,
                       "the payload names shared memory %s, which is gone: its producer or another "
                       "reader let it go before this engine read it, or it is of another machine. "
                       "Send the bytes inline: a plain pickle (pickle.dumps) of CPU tensors",
                       name);
    return hr_fail(err, HR_ERR_IO,
                   "the payload names shared memory %s, which cannot be opened for reading and "
                   "writing: %s. Send the bytes inline: a plain pickle of CPU tensors",
                   name, strerror(error));
}

hr_status hr_torch_shm_take(const unsigned char *name, uint64_t name_size, void *data,
                            uint64_t bytes, bool keep, hr_error *err) {
    char text[MAX_NAME + 1];
    if (!copy_name(name, name_size, text))
        return hr_fail(err, HR_ERR_INVALID,
                       "the payload names shared memory that is not torch's (a name like "
                       "/torch_123_456_0); it was not opened");
    int fd = shm_open(text, O_RDWR, 0);
    if (fd < 0)
        return refuse_open(text, errno, err);
    hr_status status = check_object(fd, text, bytes, err);
    if (status == HR_OK)
        status = copy_bytes(fd, text, data, bytes, err);
    if (status == HR_OK && !keep)
        status = give_back(fd, text, err);
    close(fd);
    return status;
}
