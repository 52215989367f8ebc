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

// learned holds how decode engines reach prefill engines, as the prefill engines have reported it.
type learned struct {
	deps             *Deps
	bootstrapAnswers sync.Map // bootstrapAnswer values of vllm-mooncake prefill engines, by the candidate's ID
}

// bootstrapAnswer is an answer of a bootstrap server, with the time from which bootstrapAnswerLife counts.
type bootstrapAnswer struct {
	answer mooncake.BootstrapInfo
	at     time.Time
}

// forgetBootstrapAnswers drops the answers of the bootstrap server of an engine, because they name a process that is gone.
func (l *learned) forgetBootstrapAnswers(engine string) {
	for candidate := range l.bootstrapAnswers.Range {
		if strings.HasPrefix(candidate.(string), engine+"/") {
			l.bootstrapAnswers.Delete(candidate)
		}
	}
}

// bootstrapAnswerLife is how long an answer is used before the server is asked again. It bounds how long requests to a restarted engine may
// still name its old engine id.
const bootstrapAnswerLife = 5 * time.Second

// BootstrapInfo returns the part of a hand-off that prefill engines of the vllm-mooncake connector do not return: the proxy asks the
// engine's bootstrap server for it. nil: the candidate has another connector. An answer of the server is used for bootstrapAnswerLife, and
// once more for that time if the server does not answer the next question in time. The caller gives the result a new TransferID.
func (l *learned) BootstrapInfo(c prefill.Candidate) (*mooncake.BootstrapInfo, error) {
	if c.Profile.Connector != mooncake.VLLMMooncake {
		return nil, nil
	}
	last, hasLast := l.bootstrapAnswers.Load(c.ID)
	stored, _ := last.(bootstrapAnswer) // the zero value, if there is no last answer
	if !hasLast || time.Since(stored.at) > bootstrapAnswerLife {
		ctx, cancel := context.WithTimeout(l.deps.Context, l.deps.Settings().Limits.ConnectTimeout)
		defer cancel()
		info, err := engine.Bootstrap(ctx, l.deps.Client, c.Target, c.Profile.BootstrapPort)
		switch {
		case err == nil: // the server answered
			stored.answer = info
		case !hasLast || ctx.Err() == nil: // there is no earlier answer, or the call failed before its deadline
			return nil, err
		default: // the server is slow, so its last answer is used for another bootstrapAnswerLife
			l.deps.Log.Warn("a bootstrap server did not answer in time; the proxy uses its last answer", zap.String("candidate", c.ID),
				zap.Error(err))
		}
		stored.at = time.Now()
		l.bootstrapAnswers.Store(c.ID, stored)
	}
	info := stored.answer // a copy, because the caller changes it
	return &info, nil
}
