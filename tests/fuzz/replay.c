/* Runs a fuzz target over every file of a directory, with any compiler: an input that once broke
 * something stays a test. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL)
        return -1;
    int result = -1;
    uint8_t *data = NULL;
    if (fseek(file, 0, SEEK_END) != 0)
        goto out;
    long size = ftell(file);
    if (size < 0)
        goto out;
    rewind(file);
    /* Exactly as large as the input, so that a sanitizer sees a read past its end. */
    data = malloc(size > 0 ? (size_t)size : 1);
    if (data == NULL || fread(data, 1, (size_t)size, file) != (size_t)size)
        goto out;
    LLVMFuzzerTestOneInput(data, (size_t)size);
    result = 0;
out:
    free(data);
    fclose(file);
    return result;
}

int main(int argc, char **argv) {
    DIR *dir = argc == 2 ? opendir(argv[1]) : NULL;
    if (dir == NULL) {
        fprintf(stderr, "replay: wanted one directory that can be read\n");
        return 2;
    }
    int inputs = 0, failed = 0;
    for (struct dirent *entry = readdir(dir); entry != NULL; entry = readdir(dir)) {
        char path[4096];
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/%s", argv[1], entry->d_name);
        inputs++;
        if (replay(path) != 0) {
            fprintf(stderr, "replay: %s cannot be read\n", path);
            failed++;
        }
    }
    closedir(dir);
    printf("replay: %d inputs\n", inputs);
    return inputs > 0 && failed == 0 ? 0 : 1;
}
