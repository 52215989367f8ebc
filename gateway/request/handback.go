package request

import (
	"bytes"
	"slices"
	"time"

	"go.uber.org/zap"

	"evenkeel/gateway/handback"
	"evenkeel/gateway/openai"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// How a request goes on from the KV that the decode engine of the turn before has kept (profile hand_back: fetched).

// ownTurns says whose turns a request may go on from, and how its prompt goes. ok is false for a prompt whose token ids nobody has said,
// for one that the engine changes, and if the engine must compute it.
func ownTurns(j *job) (scope string, prompt []int32, ok bool) {
	prompt, _ = j.parts().IDs()
	cut, _ := j.body.Get("truncate_prompt_tokens")
	if prompt == nil || cut != nil || j.req.PromptRows || j.req.Beams > 0 || openai.HasMedia(&j.body, j.req.Endpoint) {
		return "", nil, false
	}
	salt, _ := j.body.Get("cache_salt")
	return j.record.Key + "\x00" + j.model.Name + "\x00" + string(salt), prompt, true
}

// fetching has the prefill engine of a lease fetch what the decode engine of the turn before has kept. It returns the turn, which is
// nobody else's now; nil: there is none.
func (j *job) fetching(lease *prefill.Lease) (leg *mooncake.Leg, t *handback.Turn) {
	if lease.Candidate.Profile.HandBack != mooncake.HandBackFetched || j.life.Resumed() {
		return j.leg, nil
	}
	scope, prompt, ok := ownTurns(j)
	if !ok {
		return j.leg, nil
	}
	engines := j.srv.Engines()
	t = j.srv.turns.Take(scope, prompt, time.Now(), func(t *handback.Turn) bool {
		gone, _ := engines.Outlived(t.Made)
		return !gone && !j.srv.Fleet.DownSince(t.Made.Key, t.Came)
	})
	if t == nil {
		j.srv.metrics.handBacks.WithLabelValues("none").Inc()
		return j.leg, nil
	}
	longer := *j.leg
	longer.Fetch = t.Params
	return &longer, t
}

// fetched notes how the prefill went that was to fetch a turn.
func (j *job) fetched(t *handback.Turn, well bool) {
	switch {
	case t == nil:
	case well:
		j.srv.metrics.handBacks.WithLabelValues("fetched").Inc()
	default: // the next attempt goes without it
		j.srv.metrics.handBacks.WithLabelValues("failed").Inc()
		j.srv.Log.Warn("a prefill that was to fetch the KV of the turn before has failed; the prompt is computed if another attempt is left",
			zap.Inline(j), zap.String("kept_by", t.Made.Key), zap.Int("tokens", len(t.IDs)))
	}
}

// keepTurn remembers the KV of an answer that is whole.
func (s *stream) keepTurn() {
	j, p, said := s.job, s.rank.Profile, &s.answer.Trail
	if p.HandBack != mooncake.HandBackFetched || len(said.HandBack) == 0 || j.life.Resumed() || !said.Exact() || s.local || s.partner != nil {
		return
	}
	scope, prompt, ok := ownTurns(j)
	engines := j.srv.Engines()
	made := engines.Born(s.rank.Instance)
	if !ok || made.Process != j.process { // its KV is of a process or of weights that are gone
		return
	}
	tokens, err := p.ReadHandBack(said.HandBack, j.srv.Fleet.KnownHost)
	all := slices.Concat(prompt, said.IDs)
	if err != nil || tokens > len(all) {
		j.srv.Log.Warn("what a decode engine says of the KV that it keeps is not used", zap.Inline(j), zap.String("engine", s.rank.Target.ID),
			zap.Int("tokens", tokens), zap.Error(err))
		return
	}
	now := time.Now()
	j.srv.turns.Keep(&handback.Turn{
		Scope: scope, IDs: all[:tokens:tokens], Params: bytes.Clone(said.HandBack), Made: made, Came: now,
		Until: now.Add(p.Keeps() - p.Keeps()/4),
	}, now, j.srv.Settings().Limits.ResumeBytes)
}
