// The functions between the projections (docs/numerics.md): forward and gradient, a vector of elements at
// a time. g, u: gate and up; d: gradient of the result. Clamps pass the gradient inside and at their
// bounds, as torch's clamp does.

inline Vec at_most(Vec v, float limit) { return vselect(v > limit, vset1(limit), v); }
inline Vec at_least(Vec v, float limit) { return vselect(v < limit, vset1(limit), v); }

template <Activation A>
inline Vec activate(const ActivationSpec& spec, Vec g, Vec u) {
    if constexpr (A == Activation::relu2) {
        const Vec r = at_least(u, 0.0f);  // a NaN stays one
        return r * r;
    } else if constexpr (A == Activation::gelu_tanh) {
        return g * vgelu_gate(g) * u;
    } else {
        g = at_most(g, spec.gate_limit);
        u = at_least(at_most(u, spec.up_limit), -spec.up_limit);
        if constexpr (A == Activation::swiglu_oai)
            return (u + 1.0f) * (g * vsigmoid(spec.alpha * g));
        else
            return g * vsigmoid(g) * u;
    }
}

// Returns the activation as well: its parts are shared with its gradient.
template <Activation A>
inline Vec deactivate(const ActivationSpec& spec, Vec g, Vec u, Vec d, Vec* dg, Vec* du) {
    if constexpr (A == Activation::relu2) {
        const Vec r = at_least(u, 0.0f);
        *dg = vset1(0.0f);
        *du = vselect(u < 0.0f, vset1(0.0f), d * (2.0f * u));
        return r * r;
    } else if constexpr (A == Activation::gelu_tanh) {
        const Vec s = vgelu_gate(g);
        *du = d * (g * s);
        *dg = d * u * (s + g * (s * (1.0f - s)) * vgelu_slope(g));
        return g * s * u;
    } else {
        const IntVec g_out = g > spec.gate_limit, u_out = (u > spec.up_limit) | (u < -spec.up_limit);
        g = at_most(g, spec.gate_limit);
        u = at_least(at_most(u, spec.up_limit), -spec.up_limit);
        Vec result, up_step, gate_slope;
        if constexpr (A == Activation::swiglu_oai) {
            const Vec s = vsigmoid(spec.alpha * g);
            result = (u + 1.0f) * (g * s);
            up_step = d * (g * s);
            gate_slope = d * (u + 1.0f) * (s * (1.0f + spec.alpha * g * (1.0f - s)));
        } else {
            const Vec s = vsigmoid(g);
            result = g * s * u;
            up_step = d * (g * s);
            gate_slope = d * u * (s * (1.0f + g * (1.0f - s)));
        }
        *du = vselect(u_out, vset1(0.0f), up_step);
        *dg = vselect(g_out, vset1(0.0f), gate_slope);
        return result;
    }
}
