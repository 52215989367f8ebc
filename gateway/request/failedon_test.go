package request

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/gateway/config"
	"evenkeel/gateway/receipt"
	"evenkeel/mooncake"
)

// An attempt that is bound before its prefill has both engines, whichever of them fails. Its
// receipt says which one did, and names none where none did.
func TestTheReceiptSaysWhichEngineFailed(t *testing.T) {
	t.Parallel()
	failed := func(b *bed) (names []string) {
		b.over()
		for _, a := range b.Journal.Receipts.Last(1, receipt.Filter{}, false)[0].Attempts {
			if a.Cause != "" {
				names = append(names, a.FailedOn)
			}
		}
		return names
	}
	for _, connector := range append([]string{""}, earlyConnectors...) {
		for name, tt := range map[string]struct {
			p, d []string // how the engines fail
			want []string
		}{
			"a prefill engine":       {[]string{"is refused with 500"}, nil, []string{"p0/0"}},
			"both of them":           {[]string{"is refused with 500", "is refused with 500"}, nil, []string{"p0/0", "p1/0"}},
			"a decode engine":        {nil, []string{"is refused with 500"}, []string{"d0"}},
			"both of these":          {nil, []string{"is refused with 500", "is refused with 500"}, []string{"d0", "d1"}},
			"an answer that is lost": {nil, []string{"is reset in the middle"}, []string{"d0"}},
		} {
			t.Run(connector+" "+name, func(t *testing.T) {
				t.Parallel()
				b := start(t, setup{prefill: both, decode: both, profile: mooncake.Profile{Connector: connector}, configure: confirm(patience)})
				for role, engines := range map[string][]*refengine.Engine{"p": b.p, "d": b.d} {
					for i, how := range map[string][]string{"p": tt.p, "d": tt.d}[role] {
						if rule := ends[how]; how != "" {
							rule.Count = 1
							require.NoError(t, engines[i].SetFaults(rule))
						}
					}
				}
				b.judge(long, `"stream":true,`)
				require.Equal(t, tt.want, failed(b))
				if len(tt.p) == 1 { // of two, the first one was tried again, and answered
					require.Contains(t, b.Prefill.Status()[0].Fault, "500", "what failed there last")
				}
				b.settle()
			})
		}
	}
	t.Run("no rank has room", func(t *testing.T) {
		t.Parallel()
		b, free := full(t, setup{configure: func(c *config.Config, _ *Deps) { c.Pool.TTL = 200 * time.Millisecond }})
		require.Equal(t, "503", b.judge(short, ""))
		var ended []*receipt.Receipt // a client has the answer a moment before
		b.eventually("it is told of", func() bool { ended = b.Journal.Receipts.Last(1, receipt.Filter{}, false); return len(ended) == 1 })
		require.Equal(t, "pool_timeout", ended[0].Outcome)
		free()
		require.Equal(t, []string{""}, failed(b)[:1])
		b.settle()
	})
}
