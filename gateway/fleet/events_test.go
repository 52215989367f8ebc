package fleet

import (
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/engine"
	"evenkeel/prefill/kvevents"
)

func TestWhereARankPublishes(t *testing.T) {
	at := func(rank int, host string, port int) engine.Publisher {
		return engine.Publisher{Rank: rank, Events: engine.HostPort{Host: host, Port: port}}
	}
	replayed := at(0, "", 5557)
	replayed.Replay = engine.HostPort{Port: 6000}
	for _, tt := range []struct {
		name        string
		all         []engine.Publisher
		rank, ranks int
		hosts       []string
		want        kvevents.Place
		fails       string
	}{
		{"at all addresses of the engine", []engine.Publisher{replayed}, 0, 1, []string{"e0"}, kvevents.Place{Events: "e0:5557", Replay: "e0:6000"}, ""},
		{"ranks of a node are counted from any number on", []engine.Publisher{at(4, "", 1), at(5, "", 2)}, 1, 2, []string{"e0"}, kvevents.Place{Events: "e0:2"}, ""},
		{"an address that the name leads to", []engine.Publisher{at(0, "127.0.0.1", 1)}, 0, 1, []string{"localhost"}, kvevents.Place{Events: "127.0.0.1:1"}, ""},
		{"an address of kv_hosts", []engine.Publisher{at(0, "10.0.0.7", 1)}, 0, 1, []string{"127.0.0.1", "10.0.0.7"}, kvevents.Place{Events: "10.0.0.7:1"}, ""},
		{"another host", []engine.Publisher{at(0, "10.0.0.7", 1)}, 0, 1, []string{"127.0.0.1"}, kvevents.Place{},
			"at 10.0.0.7:1, which is no address of the engine that the proxy knows; if it is one, write it into kv_hosts"},
		{"a name of another host", []engine.Publisher{at(0, "collector", 1)}, 0, 1, []string{"127.0.0.1"}, kvevents.Place{}, "which is no address of the engine"},
		{"a rank is not ready", []engine.Publisher{at(1, "", 1)}, 0, 2, []string{"e0"}, kvevents.Place{}, "tells of 1 ranks, and the config of 2"},
		{"one in the middle is not", []engine.Publisher{at(0, "", 1), at(2, "", 2)}, 1, 2, []string{"e0"}, kvevents.Place{}, "tells of 2 ranks"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := placeOf(t.Context(), tt.all, tt.rank, tt.ranks, tt.hosts)
			if tt.fails != "" {
				require.ErrorContains(t, err, tt.fails)
				return
			}
			require.NoError(t, err)
			require.Equal(t, tt.want, got)
		})
	}
}
