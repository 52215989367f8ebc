package lease

import (
	"slices"
	"time"

	"go.uber.org/zap"
)

// logOnce logs a failure once, until the same call has succeeded again.
type logOnce struct {
	failing        [AskBack + 1]bool
	slow           bool
	holderDuration time.Duration // of another holder's lease at the last look
	holderMembers  []string      // of another holder's lease at the last look
	membersDiffer  bool
}

func (s *logOnce) logResult(log *zap.Logger, r result, now time.Time, fastLimit time.Duration) {
	if r.member != "" { // an operator need not act on this
		if r.err != nil {
			log.Debug("ownership: a member does not promise not to take over", zap.String("member", r.member), zap.Error(r.err))
		}
		return
	}
	failed := r.err != nil
	switch failedBefore := s.failing[r.call]; {
	case failed && failedBefore:
		log.Debug("ownership: the call still fails", zap.Stringer("call", r.call), zap.Error(r.err))
	case failed:
		log.Warn("ownership: a call to the lease's store or holder fails; the next line about it comes when it succeeds",
			zap.Stringer("call", r.call), zap.Error(r.err))
	case failedBefore:
		log.Info("ownership: the call succeeds again", zap.Stringer("call", r.call))
	}
	s.failing[r.call] = failed
	if r.call == AskBack { // how long this takes depends on the holder, not on the store
		return
	}
	switch took := now.Sub(r.sent); {
	case failed:
	case took > fastLimit && !s.slow:
		log.Warn("ownership: the lease's store answers so slowly that an owner may fail to renew its lease in time and stop admitting; the next "+
			"line about it comes when the store is fast again",
			zap.Stringer("call", r.call), zap.Duration("took", took), zap.Duration("at_most", fastLimit))
		s.slow = true
	case took <= fastLimit && s.slow:
		log.Info("ownership: the lease's store is fast enough again")
		s.slow = false
	}
}

func (s *logOnce) logChange(log *zap.Logger, before, v View) {
	switch {
	case v.Voted && !before.Voted:
		log.Warn("ownership: the lease's store does not confirm renewals; this proxy goes on, because all other members have promised not to "+
			"take over", zap.Int64("epoch", v.Epoch))
	case before.Voted && !v.Voted && v.Admits:
		log.Info("ownership: the lease's store confirms renewals again", zap.Int64("epoch", v.Epoch))
	case v.Phase == Fenced && before.Admits:
		log.Info("ownership: this proxy admits nothing any more, because the lease's store confirmed no renewal in time, or does not know the "+
			"lease", zap.Int64("epoch", v.Epoch))
	}
}

func (s *logOnce) logLook(log *zap.Logger, cfg *Config, rec Record) {
	if rec.Holder == "" || rec.Holder == cfg.Self {
		return
	}
	differ := !slices.Equal(rec.Members, cfg.Members)
	alreadyLogged := s.membersDiffer && slices.Equal(rec.Members, s.holderMembers)
	switch {
	case differ && !alreadyLogged:
		log.Warn("ownership: the holder's ha.members differ from ours, so no owner can go on while the lease's store is away; write the same "+
			"list into the config of every proxy",
			zap.String("holder", rec.Holder), zap.Strings("holders", rec.Members), zap.Strings("ours", cfg.Members))
	case !differ && s.membersDiffer:
		log.Info("ownership: the holder's ha.members are the same as ours again")
	}
	s.membersDiffer, s.holderMembers = differ, rec.Members
	if rec.Duration == s.holderDuration || rec.Duration == 0 {
		return
	}
	if s.holderDuration = rec.Duration; rec.Duration != cfg.Duration {
		log.Warn("ownership: the holder's lease has another duration than ours; the longer one counts; write the same lease duration into the "+
			"config of every proxy",
			zap.String("holder", rec.Holder), zap.Duration("holders", rec.Duration), zap.Duration("ours", cfg.Duration))
	}
}

type result struct {
	call            Call
	sent            time.Time
	totalSuspension time.Duration
	rec             Record
	err             error
	member          string // asked for a vote; empty: the call was no question for a vote
	apply           func(now time.Time, err error)
}
