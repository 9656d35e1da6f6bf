// Phase dispatch: what the engine sees of an instruction set.

template <class S, class C>
struct Entry {
    using Work = Moe<S, C>;
    struct Entered {
        Entered() { C::enter(); }
        ~Entered() { C::leave(); }
    };

    static int64_t tasks(const Pass& p, Phase phase) {
        switch (phase) {
            case Phase::store_x:
            case Phase::store_dy:
                return pieces(p.tokens, kTokenChunk);
            case Phase::lora_mid:
                return p.rank_pad > 0 || Quantised<C> ? p.num_chunks : 0;
            case Phase::lora_in:
            case Phase::lora_out:
                return p.rank_pad > 0 ? p.num_chunks : 0;
            case Phase::dlora_in:
            case Phase::shrink:
            case Phase::restore:
                return p.num_chunks;
            case Phase::gate_up:
            case Phase::dact:
                return p.num_spans * pieces(p.inter, p.inter_slab);
            case Phase::down:
                return scatter_tasks(p);
            case Phase::dx_grads:
                return dx_tasks(p) + grad_tasks(p);
        }
        return 0;
    }

    static int64_t grad_tasks(const Pass& p) {
        return p.lora_grads == nullptr ? 0 : p.num_groups * Work::grad_tasks_per_group(p);
    }

    static size_t scratch_bytes(const Pass& p, Phase phase) {
        const bool copies = phase == Phase::store_x || phase == Phase::store_dy || phase == Phase::shrink ||
                            phase == Phase::restore;
        return copies ? 0 : carve<C>(p, nullptr, nullptr);
    }

    static void run(const Pass& p, Phase phase, int64_t task, void* scratch) {
        Work work{p, {}};
        if (scratch_bytes(p, phase) > 0) carve<C>(p, static_cast<char*>(scratch), &work.s);
        const Entered entered;
        switch (phase) {
            case Phase::store_x:
                return work.store_x(task);
            case Phase::lora_in:
                return work.lora_in(task);
            case Phase::gate_up:
                return work.gate_up(task);
            case Phase::shrink:
                return work.shrink(task);
            case Phase::lora_mid:
                return work.lora_mid(task);
            case Phase::down:
                return work.down(task);
            case Phase::store_dy:
                return work.store_dy(task);
            case Phase::restore:
                return work.restore(task);
            case Phase::lora_out:
                return work.lora_out(task);
            case Phase::dact:
                return work.dact(task);
            case Phase::dlora_in:
                return work.dlora_in(task);
            case Phase::dx_grads: {
                const int64_t scattering = dx_tasks(p);
                return task < scattering ? work.dx(task) : work.adapter_grads(task - scattering);
            }
        }
    }

    static int32_t expert_of(const Pass& p, Phase phase, int64_t task) {
        switch (phase) {
            case Phase::gate_up:
            case Phase::dact:
                return p.spans[task / pieces(p.inter, p.inter_slab)].expert;
            case Phase::lora_in:
            case Phase::lora_mid:
            case Phase::lora_out:
            case Phase::dlora_in:
                return p.groups[p.chunks[task].group].expert;
            case Phase::dx_grads: {
                const int64_t scattering = dx_tasks(p);
                return task < scattering
                           ? -1
                           : p.groups[(task - scattering) / Work::grad_tasks_per_group(p)].expert;
            }
            default:
                return -1;
        }
    }

    static int64_t products(int64_t runs) {
        constexpr int64_t kRows = C::Micro::kMaxRows, kSlices = 4;
        alignas(64) typename C::T left[kRows * kSlices * kSlice];
        alignas(64) typename C::T panel[kSlices * slice_steps<C>() * step_size<typename C::T>()];
        alignas(64) float tile[kRows * kColumns];
        memset(left, 0, sizeof(left));
        memset(panel, 0, sizeof(panel));
        memset(tile, 0, sizeof(tile));
        const Entered entered;
        typename C::Ahead nothing;
        for (int64_t i = 0; i < runs; ++i) C::run(nothing, kRows, left, kSlices, panel, tile, true, Touch{});
        return runs * 2 * kRows * kSlices * kSlice * kColumns;
    }

    static constexpr Kernels kernels{sizeof(typename C::T) == 2,
                                     C::Micro::kMaxRows,
                                     C::Micro::kRowStep,
                                     kColumns,
                                     (C::Micro::kSumPanels > 1),
                                     quantised_size<C>(),
                                     tasks,
                                     scratch_bytes,
                                     run,
                                     expert_of,
                                     products};
};
