// Activations in the order in which the codes lie, of the same type: padded places are 0.
//
// Macros: INPUTS, PLACES, INPUT (0 f32, 1 f16, 2 bf16).

struct OrderCall {
    unsigned long long order;
    unsigned long long inputs;
    unsigned long long ordered;
};

#if INPUT == 0
typedef float Element;
#else
typedef unsigned short Element;
#endif

extern "C" __global__ void order_inputs(const __grid_constant__ OrderCall call) {
    const unsigned int place = 128 * blockIdx.x + threadIdx.x, row = blockIdx.y;
    if (place >= PLACES) return;
    const unsigned int input = reinterpret_cast<const unsigned int*>(call.order)[place];
    const Element* from = reinterpret_cast<const Element*>(call.inputs) + static_cast<size_t>(row) * INPUTS;
    Element* to = reinterpret_cast<Element*>(call.ordered) + static_cast<size_t>(row) * PLACES;
    to[place] = input < INPUTS ? from[input] : Element(0);
}
