// Phase dispatch: what the engine sees of an instruction set.

template <class S, class M>
struct Entry {
    static int64_t tasks(const Pass& p, Phase phase) {
        switch (phase) {
            case Phase::convert_x:
            case Phase::widen_x:
            case Phase::convert_dy:
                return pieces(p.tokens, kTokenChunk);
            case Phase::lora_in:
            case Phase::lora_mid:
            case Phase::lora_out:
                return p.rank_stride > 0 ? p.num_chunks : 0;
            case Phase::dlora_in:
                return p.num_chunks;
            case Phase::gate_up:
            case Phase::dact:
                return p.num_expert_rows * pieces(p.inter, kSlab);
            case Phase::down:
                return pieces(p.hidden, p.slab_columns);
            case Phase::dx_grads:
                return pieces(p.hidden, p.slab_columns) + grad_tasks(p);
        }
        return 0;
    }

    static int64_t grad_tasks(const Pass& p) {
        return p.lora_grads == nullptr ? 0 : p.num_groups * Moe<S, M>::grad_tasks_per_group(p);
    }

    static size_t scratch_bytes(const Pass& p, Phase phase) {
        const bool copies =
            phase == Phase::convert_x || phase == Phase::widen_x || phase == Phase::convert_dy;
        return copies ? 0 : carve<M>(p, nullptr, nullptr);
    }

    static void run(const Pass& p, Phase phase, int64_t task, void* scratch) {
        Moe<S, M> moe{p, {}};
        if (scratch_bytes(p, phase) > 0) carve<M>(p, static_cast<char*>(scratch), &moe.s);
        switch (phase) {
            case Phase::convert_x:
                return moe.convert_x(task);
            case Phase::widen_x:
                return moe.widen_x(task);
            case Phase::lora_in:
                return moe.lora_in(task);
            case Phase::gate_up:
                return moe.gate_up(task);
            case Phase::lora_mid:
                return moe.lora_mid(task);
            case Phase::down:
                return moe.down(task);
            case Phase::convert_dy:
                return moe.convert_dy(task);
            case Phase::lora_out:
                return moe.lora_out(task);
            case Phase::dact:
                return moe.dact(task);
            case Phase::dlora_in:
                return moe.dlora_in(task);
            case Phase::dx_grads: {
                const int64_t slabs = pieces(p.hidden, p.slab_columns);
                return task < slabs ? moe.dx(task) : moe.adapter_grads(task - slabs);
            }
        }
    }

    static int32_t expert_of(const Pass& p, Phase phase, int64_t task) {
        switch (phase) {
            case Phase::gate_up:
            case Phase::dact:
                return p.expert_rows[task / pieces(p.inter, kSlab)].expert;
            case Phase::lora_in:
            case Phase::lora_mid:
            case Phase::lora_out:
            case Phase::dlora_in:
                return p.groups[p.chunks[task].group].expert;
            case Phase::dx_grads: {
                const int64_t slabs = pieces(p.hidden, p.slab_columns);
                return task < slabs ? -1
                                    : p.groups[(task - slabs) / Moe<S, M>::grad_tasks_per_group(p)].expert;
            }
            default:
                return -1;
        }
    }

    static constexpr Kernels kernels{M::kPack == 2, kColumns, tasks, scratch_bytes, run, expert_of};
};
