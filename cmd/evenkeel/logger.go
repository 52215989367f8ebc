package main

import (
	"io"
	"os"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/term"
)

// newLogger writes to out, without sampling: an SRE needs every line of the one
// request that failed. A terminal gets lines for people, anything else JSON.
func newLogger(level string, out io.Writer) (*zap.Logger, error) {
	l, err := zapcore.ParseLevel(level)
	if err != nil {
		return nil, err
	}
	enc := logEncoder(isTerminal(out))
	core := zapcore.NewCore(enc, zapcore.Lock(zapcore.AddSync(&logOutput{out: out, enc: enc.Clone()})), l)
	return zap.New(core, zap.AddCaller(), zap.AddStacktrace(zapcore.DPanicLevel)), nil
}

// logEncoder is how a line looks: for people the time of day, the level, what
// happened, and the fields as JSON behind it.
func logEncoder(forPeople bool) zapcore.Encoder {
	cfg := zap.NewProductionEncoderConfig()
	if !forPeople {
		cfg.EncodeTime = zapcore.RFC3339NanoTimeEncoder
		return zapcore.NewJSONEncoder(cfg)
	}
	cfg.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
	cfg.EncodeLevel = zapcore.CapitalLevelEncoder
	cfg.EncodeDuration = zapcore.StringDurationEncoder
	cfg.ConsoleSeparator = "  "
	cfg.CallerKey = ""
	return zapcore.NewConsoleEncoder(cfg)
}

// isTerminal tells whether somebody reads what is written there.
func isTerminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// logOutput counts the lines that cannot be written, because the reader of a
// pipe has gone or a disk is full, and tells of them once one can be written.
type logOutput struct {
	out  io.Writer
	enc  zapcore.Encoder
	lost int   // lines that could not be written, and of which nobody was told yet
	why  error // why the first of them could not be written
}

// Write writes one line. zap calls it under a lock.
func (o *logOutput) Write(line []byte) (int, error) {
	n, err := o.out.Write(line)
	switch {
	case err != nil:
		if o.lost++; o.lost == 1 {
			o.why = err
		}
	case o.lost > 0:
		told, encErr := o.enc.EncodeEntry(zapcore.Entry{Level: zapcore.WarnLevel, Time: time.Now(),
			Message: "log lines before this one could not be written and are lost"},
			[]zapcore.Field{zap.Int("lines_lost", o.lost), zap.Error(o.why)})
		if encErr != nil { // of plain values: it does not fail
			break
		}
		if _, err := o.out.Write(told.Bytes()); err == nil {
			o.lost = 0
		}
		told.Free()
	}
	return n, err
}
