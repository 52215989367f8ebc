package reload

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"go.uber.org/zap"

	"evenkeel/gateway/config"
	"evenkeel/predictor"
)

// maxFit bounds what is read: the outputs of 4096 keys are some MB.
const maxFit = 256 << 20

// read parses the file if it is not the one read last; nil when it is, or when
// there is none to read.
func (f *fitFile) read() (*predictor.Fit, error) {
	if f.path == "" {
		return nil, nil
	}
	info, err := os.Stat(f.path)
	if err != nil {
		return nil, err
	}
	state := fileState{info.ModTime(), info.Size()}
	if state == f.seen {
		return nil, nil
	}
	f.seen = state // also of a bad one: it is told once
	if state.size > maxFit {
		return nil, fmt.Errorf("%s has %d bytes, more than %d: it is no fit file", f.path, state.size, maxFit)
	}
	text, err := os.ReadFile(f.path)
	if err != nil {
		return nil, err
	}
	fit, err := predictor.ParseFit(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.path, err)
	}
	f.kind = fit.Kind
	return fit, nil
}

// doubtFit warns of a fit file of which the policies read nothing, or only a part.
func (r *Reloader) doubtFit(cfg *config.Config) {
	if r.fit.kind == "" {
		return // there is no file, or it could not be read
	}
	decision := cfg.Decision()
	if why := decision.DoubtFit(r.fit.kind); why != "" {
		r.host.Log.Warn(why, zap.String(keyField, "predictor.file"))
	}
}

func (r *Reloader) reloadFit() (bool, error) {
	r.fit.path = r.Settings().Predictor.File
	fit, err := r.fit.read()
	if errors.Is(err, fs.ErrNotExist) || err == nil && fit == nil {
		return false, nil // between two versions, or none
	}
	if err == nil {
		err = r.host.SetFit(fit)
	}
	if err == nil {
		r.host.Log.Info("predictions start anew from the fit file", zap.String("predictor.file", r.fit.path),
			zap.String("kind", string(fit.Kind)), zap.Int("outputs", fit.Outputs.Len()))
		r.doubtFit(r.Settings().Config)
	}
	return err == nil, err
}
