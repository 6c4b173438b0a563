/* The permission to use AMX's tiles, without which their instructions raise SIGILL. */
#include "tiles.h"

#ifndef tiles_are_granted
#include <sys/syscall.h>
#include <unistd.h>

#define REQUEST_STATE 0x1023 /* ARCH_REQ_XCOMP_PERM: permission for all threads of this process */
#define TILE_DATA 18         /* XFEATURE_XTILEDATA */

int tiles_are_granted = 0;

/* Asks when the library is loaded. Linux before 5.16 and some sandboxes refuse; AVX-512 is used then. */
static __attribute__((constructor)) void request_tiles(void) {
    tiles_are_granted = syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0;
}
#endif
