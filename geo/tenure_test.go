package geo

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

// The holder has released the lease when it answers, so an answer that is not read leaves the new
// owner without the list.
func TestARegionOfManyRanksIsHandedBackWithAllOfThem(t *testing.T) {
	const ranks = 4096
	f := newFar(t)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != HandBackPath {
			f.Config.Handler.ServeHTTP(w, r)
			return
		}
		var h HandedBack
		_ = json.NewDecoder(r.Body).Decode(&h.HandBack)
		for i := range ranks {
			h.Ranks = append(h.Ranks, Resident{ID: fmt.Sprintf("10.0.0.1:8000/%d", i), Requests: 200, KVTokens: 1_000_000})
		}
		_ = json.NewEncoder(w).Encode(h)
	}))
	t.Cleanup(s.Close)
	ps, _ := node(t, nil, entry(t, "eu-1", s.URL))
	eventually(t, func() bool { return first(ps).Up })
	h, err := ps.AskBack(t.Context(), "eu-1", HandBack{Region: "us", Epoch: 3})
	require.NoError(t, err)
	require.Len(t, h.Ranks, ranks)
}
