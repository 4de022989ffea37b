package policy_test

import (
	"net/netip"
	"testing"

	"virtkit/core/policy"
)

func TestAllowAllNamesNoLayer(t *testing.T) {
	f := policy.Flow{Port: "build", Proto: policy.TCP, Dst: netip.MustParseAddrPort("192.0.2.1:443")}
	if v := (policy.AllowAll{}).Decide(f); !v.Allow || v.Layer != policy.LayerNone {
		t.Errorf("Decide(%v) = %+v, want allowed by no layer", f, v)
	}
}

func TestFuncDecides(t *testing.T) {
	var d policy.Decider = policy.Func(func(f policy.Flow) policy.Verdict {
		return policy.Verdict{Allow: f.Name == "a.test", Layer: "job", Reason: "not listed"}
	})
	if v := d.Decide(policy.Flow{Proto: policy.DNS, Name: "b.test"}); v.Allow || v.Layer != "job" {
		t.Errorf("Decide(b.test) = %+v, want refused by job", v)
	}
	if v := d.Decide(policy.Flow{Proto: policy.DNS, Name: "a.test"}); !v.Allow {
		t.Errorf("Decide(a.test) = %+v, want allowed", v)
	}
}

func TestCleanName(t *testing.T) {
	for in, want := range map[string]string{
		"": ".", ".": ".", "WWW.Example.com.": "www.example.com", "_sip._tcp.example": "_sip._tcp.example",
		`a\.b.example`: "a?b.example", `b\195\188cher.example`: "b??cher.example", "bücher.example": "b?cher.example",
		`x\000`: "x?", `x\\.y`: "x?.y", `x\`: "x?", `x\.`: "x?", `\12`: "?2", `\é.y`: "??.y", "a*b": "a?b", "x\ny": "x?y",
	} {
		if got := policy.CleanName(in); got != want {
			t.Errorf("CleanName(%q) = %q, want %q", in, got, want)
		}
		if again := policy.CleanName(want); again != want {
			t.Errorf("CleanName(%q) = %q: it is clean", want, again)
		}
	}
}
