/* Failures as values: formatting that keeps one error on one printable line. */
#include "errors.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* Longest text formatted before escaping; the escaped text is cut to the size of st_error.text anyway. */
enum { RAW_TEXT = 1024 };

int st_utf8_char(const unsigned char *s, size_t left, uint32_t *point) {
    static const uint32_t smallest[5] = {0, 0, 0x80, 0x800, 0x10000};
    int len = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : s[0] < 0xf5 ? 4 : 0;
    if (len == 0 || (size_t)len > left) return 0;
    uint32_t p = len == 1 ? s[0] : s[0] & (0x7fu >> len);
    for (int i = 1; i < len; i++) {
        if ((s[i] & 0xc0) != 0x80) return 0;
        p = (p << 6) | (s[i] & 0x3fu);
    }
    if (p < smallest[len] || p > 0x10ffff || (p >= 0xd800 && p <= 0xdfff)) return 0;
    *point = p;
    return len;
}

/* Characters that end a line somewhere, or reorder what a terminal shows. */
static bool is_unprintable(uint32_t p) {
    return p < 0x20 || (p >= 0x7f && p < 0xa0) || (p >= 0x2028 && p <= 0x202e) || (p >= 0x2066 && p <= 0x2069) ||
           p == 0xfeff;
}

/* Write the escape of one byte to out (5 bytes at least); returns its length. */
static int escape_byte(char *out, unsigned char c) {
    switch (c) {
    case '\n': return snprintf(out, 5, "\\n");
    case '\r': return snprintf(out, 5, "\\r");
    case '\t': return snprintf(out, 5, "\\t");
    default: return snprintf(out, 5, "\\x%02x", c);
    }
}

/* Escape `len` bytes of raw into out[size]; whole characters only, "..." at the end when not all fits. */
static void escape_text(char *out, size_t size, const char *raw, size_t len, bool cut) {
    const unsigned char *s = (const unsigned char *)raw;
    size_t n = 0, limit = size - 4; /* room for "..." and the NUL */
    for (size_t i = 0; i < len;) {
        char piece[17];
        uint32_t point = 0;
        int step = st_utf8_char(s + i, len - i, &point), wide = 0;
        if (step && !is_unprintable(point)) {
            memcpy(piece, s + i, (size_t)step);
            wide = step;
        } else {
            if (!step) step = 1;
            for (int k = 0; k < step; k++) wide += escape_byte(piece + wide, s[i + (size_t)k]);
        }
        if (n + (size_t)wide > limit) {
            cut = true;
            break;
        }
        memcpy(out + n, piece, (size_t)wide);
        n += (size_t)wide;
        i += (size_t)step;
    }
    memcpy(out + n, cut ? "..." : "", cut ? 4 : 1);
}

int st_error_set(st_error *err, const char *name, const char *text) {
    if (!err) return -1;
    snprintf(err->name, sizeof err->name, "%s", name);
    escape_text(err->text, sizeof err->text, text, strlen(text), false);
    return -1;
}

int st_vfail(st_error *err, const char *name, const char *fmt, va_list args) {
    if (!err) return -1;
    char raw[RAW_TEXT];
    int want = vsnprintf(raw, sizeof raw, fmt, args);
    if (want < 0) return st_error_set(err, name, fmt);
    bool cut = (size_t)want >= sizeof raw;
    snprintf(err->name, sizeof err->name, "%s", name);
    escape_text(err->text, sizeof err->text, raw, cut ? sizeof raw - 1 : (size_t)want, cut);
    return -1;
}

int st_fail(st_error *err, const char *name, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    st_vfail(err, name, fmt, args);
    va_end(args);
    return -1;
}
