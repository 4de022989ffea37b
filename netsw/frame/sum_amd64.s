#include "textflag.h"

// func sumAVX2(b *byte, n int) uint64
//
// Each 64 bits hold two words of 32, which are added to 64 bits each: nothing
// carries over before the sum is done.
TEXT ·sumAVX2(SB), NOSPLIT, $0-24
	MOVQ     b+0(FP), SI
	MOVQ     n+8(FP), CX
	VPXOR    Y0, Y0, Y0
	VPXOR    Y1, Y1, Y1
	VPXOR    Y2, Y2, Y2
	VPXOR    Y3, Y3, Y3
	VPCMPEQD Y4, Y4, Y4
	VPSRLQ   $32, Y4, Y4 // the low word of each

loop:
	VMOVDQU (SI), Y5
	VMOVDQU 32(SI), Y6
	VMOVDQU 64(SI), Y7
	VMOVDQU 96(SI), Y8
	VPAND   Y4, Y5, Y9
	VPAND   Y4, Y6, Y10
	VPAND   Y4, Y7, Y11
	VPAND   Y4, Y8, Y12
	VPSRLQ  $32, Y5, Y5
	VPSRLQ  $32, Y6, Y6
	VPSRLQ  $32, Y7, Y7
	VPSRLQ  $32, Y8, Y8
	VPADDQ  Y9, Y0, Y0
	VPADDQ  Y10, Y1, Y1
	VPADDQ  Y11, Y2, Y2
	VPADDQ  Y12, Y3, Y3
	VPADDQ  Y5, Y0, Y0
	VPADDQ  Y6, Y1, Y1
	VPADDQ  Y7, Y2, Y2
	VPADDQ  Y8, Y3, Y3
	ADDQ    $128, SI
	SUBQ    $128, CX
	JG      loop

	VPADDQ       Y1, Y0, Y0
	VPADDQ       Y3, Y2, Y2
	VPADDQ       Y2, Y0, Y0
	VEXTRACTI128 $1, Y0, X1
	VPADDQ       X1, X0, X0
	VPSRLDQ      $8, X0, X1
	VPADDQ       X1, X0, X0
	VMOVQ        X0, AX
	VZEROUPPER
	MOVQ         AX, ret+16(FP)
	RET
