// The functions between the projections (docs/numerics.md): forward and gradient of one element.
// g, u: gate and up; d: gradient of the result. Clamps pass the gradient inside and at their bounds, as
// torch's clamp does.

template <Activation A>
inline float activate(const ActivationSpec& spec, float g, float u) {
    if constexpr (A == Activation::relu2) {
        const float r = u < 0.0f ? 0.0f : u;  // a NaN stays one
        return r * r;
    } else if constexpr (A == Activation::gelu_tanh) {
        return g * gelu_gate(g) * u;
    } else {
        g = g > spec.limit ? spec.limit : g;
        u = u > spec.limit ? spec.limit : u;
        u = u < -spec.limit ? -spec.limit : u;
        if constexpr (A == Activation::swiglu_oai)
            return (u + 1.0f) * (g * sigmoid(spec.alpha * g));
        else
            return g * sigmoid(g) * u;
    }
}

template <Activation A>
inline void deactivate(const ActivationSpec& spec, float g, float u, float d, float* dg, float* du) {
    if constexpr (A == Activation::relu2) {
        *dg = 0.0f;
        *du = u < 0.0f ? 0.0f : d * (2.0f * u);
    } else if constexpr (A == Activation::gelu_tanh) {
        const float s = gelu_gate(g);
        const float slope = s + g * (s * (1.0f - s)) * gelu_slope(g);
        *du = d * (g * s);
        *dg = d * u * slope;
    } else {
        const bool g_in = !(g > spec.limit), u_in = !(u > spec.limit || u < -spec.limit);
        g = g_in ? g : spec.limit;
        u = u > spec.limit ? spec.limit : u;
        u = u < -spec.limit ? -spec.limit : u;
        if constexpr (A == Activation::swiglu_oai) {
            const float s = sigmoid(spec.alpha * g);
            const float step = d * (g * s);
            const float slope = d * (u + 1.0f) * (s * (1.0f + spec.alpha * g * (1.0f - s)));
            *du = u_in ? step : 0.0f;
            *dg = g_in ? slope : 0.0f;
        } else {
            const float s = sigmoid(g);
            const float step = d * (g * s);
            const float slope = d * u * (s * (1.0f + g * (1.0f - s)));
            *du = u_in ? step : 0.0f;
            *dg = g_in ? slope : 0.0f;
        }
    }
}
