"""Asks the CPU for memory that a kernel reads a little later."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def prefetch(typingctx, array, index):
    """Loads the cache line of ``array[index]`` (1-D, C-contiguous); for use in kernels."""

    def codegen(context, builder, signature, args):
        struct = context.make_array(signature.args[0])(context, builder, args[0])
        base = builder.bitcast(struct.data, ir.IntType(8).as_pointer())
        stride = builder.extract_value(struct.strides, 0)
        address = builder.gep(base, [builder.mul(args[1], stride)])
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, i32, i32, i32])
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [address.type], fnty=kind
        )
        builder.call(function, [address, i32(0), i32(3), i32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@intrinsic
def copy_bytes(typingctx, to, to_start, source, start, length):
    """Copies ``source[start : start + length]`` to `to`, uint8 [n] both; for kernels."""

    def codegen(context, builder, signature, args):
        def address(array_type, array, start):
            struct = context.make_array(array_type)(context, builder, array)
            return builder.gep(struct.data, [start])

        to_kind, _, source_kind, _, _ = signature.args
        target = address(to_kind, args[0], args[1])
        origin = address(source_kind, args[2], args[3])
        i1, i64 = ir.IntType(1), ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [target.type, origin.type, i64, i1])
        function = builder.module.declare_intrinsic(
            "llvm.memcpy", [target.type, origin.type, i64], fnty=kind
        )
        builder.call(function, [target, origin, args[4], i1(0)])
        return context.get_dummy_value()

    wide = types.int64
    return types.void(to, wide, source, wide, wide), codegen
