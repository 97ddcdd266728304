/* What the reader and the writer do, for a test that holds them against the safetensors package.
 *
 *   safetensors_tool check FILE...   one line for each: "ok" or why it is refused
 *   safetensors_tool copy IN OUT     writes the tensors of IN to OUT */
#include "format/safetensors.h"

#include <stdio.h>
#include <string.h>

static void check(const char *path) {
    hr_safetensors *file = NULL;
    hr_error err = {0};
    hr_status status = hr_safetensors_open(path, &file, &err);
    printf("%s\n", status == HR_OK ? "ok" : err.message);
    hr_safetensors_close(file);
}

static int copy(const char *from, const char *to) {
    hr_safetensors *file = NULL;
    hr_error err = {0};
    hr_status status = hr_safetensors_open(from, &file, &err);
    if (status == HR_OK)
        status =
            hr_safetensors_save(to, hr_safetensors_at(file, 0), hr_safetensors_count(file), &err);
    hr_safetensors_close(file);
    if (status != HR_OK)
        fprintf(stderr, "%s\n", err.message);
    return status == HR_OK ? 0 : 1;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "copy") == 0)
        return copy(argv[2], argv[3]);
    for (int i = 2; i < argc; i++)
        check(argv[i]);
    return 0;
}
