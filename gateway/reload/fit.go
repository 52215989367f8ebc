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

// maxFit bounds the size of a fit file, in bytes. The bound is generous: the outputs of 4096 keys
// take a few MB.
const maxFit = 256 << 20

// readIfChanged parses the fit file, and stores its version and its kind. It returns nil if no file
// is configured, or if the file has not changed since it was last read.
func (f *fitFile) readIfChanged() (*predictor.Fit, error) {
	if f.path == "" {
		return nil, nil
	}
	info, err := os.Stat(f.path)
	if err != nil {
		return nil, err
	}
	state := fileState{info.ModTime(), info.Size()}
	if state == f.lastRead { // the file has not changed
		return nil, nil
	}
	f.lastRead = state // set for a bad file, too, so that its error is reported only once
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

// warnOfUnusedFit warns if the policies in force use nothing of the fit file, or only a part of it.
func (r *Reloader) warnOfUnusedFit(cfg *config.Config) {
	if r.fitFile.kind == "" {
		return // there is no fit file, or it could not be read
	}
	decision := cfg.Decision()
	if why := decision.DoubtFit(r.fitFile.kind); why != "" {
		r.deps.Log.Warn(why, zap.String(keyField, "predictor.file"))
	}
}

// reloadFit makes predictions start anew from a new version of the fit file, and returns whether it
// did.
func (r *Reloader) reloadFit() (changed bool, err error) {
	r.fitFile.path = r.Settings().Predictor.File
	fit, err := r.fitFile.readIfChanged()
	switch {
	case errors.Is(err, fs.ErrNotExist): // probably the file is being replaced, so a later check reads it
		return false, nil
	case err != nil:
		return false, err
	case fit == nil: // the file has not changed, or none is configured
		return false, nil
	}
	if err := r.deps.SetFit(fit); err != nil {
		return false, err
	}
	r.deps.Log.Info("predictions start anew from the fit file", zap.String("predictor.file", r.fitFile.path),
		zap.String("kind", string(fit.Kind)), zap.Int("outputs", fit.Outputs.Len()))
	r.warnOfUnusedFit(r.Settings().Config)
	return true, nil
}
