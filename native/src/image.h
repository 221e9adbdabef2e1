/* Images: a conversation's state in pieces that can be kept, shared and checked (native/IMAGES.md). The manifest's
 * functions are public (strata.h) and know bytes only; those here find an entry's bytes in a session. */
#ifndef ST_IMAGE_H
#define ST_IMAGE_H

#include "session.h"
#include "strata.h"

/* Recurrent state at one position. */
typedef struct st_image_point {
    int n, flags;
    float *states, *convs, *hidden;
} st_image_point;

/* Where the state of an image lies. Who made it keeps all of that alive and as it is. */
typedef struct st_image {
    st_shape shape;
    uint8_t *const *blocks, *const *draft_blocks;
    int n_blocks, n_draft_blocks;
    const st_image_point *points;
    int n_points;
} st_image;

/* A run of an entry's bytes. */
typedef struct st_piece {
    uint8_t *at; /* NULL: not held (an image that is taken up for a part) */
    size_t bytes;
    int keep; /* of a block: positions that belong to the entry, 1..64; else 0 */
} st_piece;
enum { ST_IMAGE_PIECES = ST_IMAGE_PAGE / 64 };

void st_image_sizes_of(const st_shape *shape, st_image_sizes *sizes);
/* The pieces of an entry, in order. Returns how many; 0: a checkpoint that the image does not hold. */
int st_image_pieces(const st_image *image, const st_image_entry *entry, st_piece *pieces);
/* The piece's bytes as they stand in an image: positions behind `keep` are zero. In place, or in `scratch`, which has
 * room for a block. */
const uint8_t *st_piece_bytes(const st_image *image, const st_piece *piece, uint8_t *scratch);

#endif
