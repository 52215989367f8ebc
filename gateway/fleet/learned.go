package fleet

import (
	"context"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"evenkeel/engine"
	"evenkeel/mooncake"
	"evenkeel/prefill"
)

// learned holds what prefill engines have reported of how decode engines reach them.
type learned struct {
	deps             *Deps
	bootstrapAnswers sync.Map // bootstrapAnswer values of vllm-mooncake, by the candidate's ID
}

type bootstrapAnswer struct {
	answer mooncake.BootstrapInfo
	at     time.Time
}

// forgetBootstrapAnswers: the answers name a process that is gone.
func (l *learned) forgetBootstrapAnswers(engine string) {
	for candidate := range l.bootstrapAnswers.Range {
		if strings.HasPrefix(candidate.(string), engine+"/") {
			l.bootstrapAnswers.Delete(candidate)
		}
	}
}

// bootstrapAnswerLife bounds how long requests to a restarted engine may still name its old engine
// id.
const bootstrapAnswerLife = 5 * time.Second

// BootstrapInfo is the part of a hand-off that vllm-mooncake engines do not return: the proxy asks
// their bootstrap server. nil: another connector. If the server does not answer in time, its last
// answer is used once more. The caller gives the result a new TransferID.
func (l *learned) BootstrapInfo(c prefill.Candidate) (*mooncake.BootstrapInfo, error) {
	if c.Profile.Connector != mooncake.VLLMMooncake {
		return nil, nil
	}
	last, hasLast := l.bootstrapAnswers.Load(c.ID)
	stored, _ := last.(bootstrapAnswer) // the zero value, if there is none
	if !hasLast || time.Since(stored.at) > bootstrapAnswerLife {
		ctx, cancel := context.WithTimeout(l.deps.Context, l.deps.Settings().Limits.ConnectTimeout)
		defer cancel()
		info, err := engine.Bootstrap(ctx, l.deps.Client, c.Target, c.Profile.BootstrapPort)
		switch {
		case err == nil:
			stored.answer = info
		case !hasLast || ctx.Err() == nil: // no earlier answer, or the call failed before its deadline
			return nil, err
		default: // the server is slow
			l.deps.Log.Warn("a bootstrap server did not answer in time; the proxy uses its last answer", zap.String("candidate", c.ID),
				zap.Error(err))
		}
		stored.at = time.Now()
		l.bootstrapAnswers.Store(c.ID, stored)
	}
	info := stored.answer // the caller changes it
	return &info, nil
}
