/* The headrace command: finds the subcommand and hands over. */
#include <headrace/version.h>
#include <stdio.h>

int main(void) {
    printf("headrace %s\n", hr_version());
    return 0;
}
