// Calls Kernel::template tile<count>(...) for a row count known at run time.

template <class Kernel, int... Counts>
struct RowTable {
    using Tile = void (*)(const typename Kernel::T* const*, int64_t, const typename Kernel::T*, float*, bool,
                          Prefetch::Stream);
    static constexpr Tile tiles[] = {Kernel::template tile<Counts>...};
};
