// Witness of the arithmetic on a GPU: kernels for every rule against the scalar functions of ../src/arith.h, bit for bit,
// and their time against limits measured in the same run. README.md says how to build and run it.
#include "attention.cuh"
#include "elementary.cuh"
#include "limits.cuh"
#include "matvec.cuh"
#include "prompt.cuh"
#include "recurrent.cuh"

#include <chrono>
#include <cstring>

int main(int argc, char **argv) {
    struct Part {
        const char *name;
        void (*run)(const Limits &);
    };
    const Part parts[] = {{"prompt", prompt}, {"recurrent", recurrent}, {"attention", attention},
                          {"matvec", matvec}, {"rows", rows},           {"elementary", elementary}};
    for (int i = 1; i < argc; i++)
        if (std::none_of(std::begin(parts), std::end(parts),
                         [&](const Part &p) { return !std::strcmp(p.name, argv[i]); })) {
            std::fprintf(stderr,
                         "usage: spike [prompt] [recurrent] [attention] [matvec] [rows] [elementary]   (none: all)\n");
            return 2;
        }
    Limits lim = measure_limits();
    for (const Part &p : parts) {
        bool asked = argc == 1;
        for (int i = 1; i < argc; i++) asked |= !std::strcmp(p.name, argv[i]);
        if (!asked) continue;
        auto t0 = std::chrono::steady_clock::now();
        std::printf("\n-- %s\n", p.name);
        p.run(lim);
        std::printf("(%.1f s)\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - t0).count());
    }
    std::printf("\n%zu differing values in all\n", total_differing);
    return total_differing != 0;
}
