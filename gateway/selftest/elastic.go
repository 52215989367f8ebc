package selftest

import (
	"context"
	"encoding/json"
	"net/http"

	"evenkeel/mooncake"
)

// elastic warns of a server of SGLang that goes on without a rank whose GPU has failed: a
// request that names such a rank ends it.
func (t *tester) elastic(ctx context.Context, s subject) {
	if s.profile.Connector != mooncake.SGLang || s.profile.NamedRank(s.target.Rank) < 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	status, body, err := t.client.Get(ctx, s.target, "/server_info", answerBytes)
	var told struct {
		Backend string `json:"elastic_ep_backend"`
	}
	if err != nil || status != http.StatusOK || json.Unmarshal(body, &told) != nil || told.Backend == "" {
		return
	}
	t.report(s.name, Warn, "runs with elastic EP (--elastic-ep-backend): if one of its GPUs fails, the next request that names the rank ends the whole server; set name_ranks: false in its profile")
}
